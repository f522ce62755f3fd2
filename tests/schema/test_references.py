"""References of schemas lead on, to another part of a value at the latest."""

from __future__ import annotations

from time import thread_time
from typing import Any

import pytest

from hdserve import grammar
from hdserve.schema import enforceable
from hdserve.schema.references import check_references

CIRCLE = {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}]},
        CIRCLE,
        {"type": "array", "items": {"$ref": "#/$defs/x"}, **CIRCLE},
        {"properties": {"a": {"properties": {"b": {"$ref": "#/properties/a/properties/b"}}}}},
        {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/1"}]},
        {"$defs": {"a b/": {"oneOf": [{"$ref": "#/%24defs/a%20b~1"}]}}},
        {"properties": {"a": {"$id": "a.json", "$ref": "#"}}},
        {"additionalProperties": {"allOf": [{}, {"$ref": "#/additionalProperties"}]}},
    ],
)
def test_circles_are_refused(schema: dict[str, Any]) -> None:
    """Wherever they are."""
    with pytest.raises(ValueError, match=r"^\$ref: a reference leads to itself"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {}}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$id": "x.json", "$ref": "#/$defs/y"}}},
        {"properties": {"a": {"$id": "a", "$ref": "#/$defs/x", "$defs": {"x": {}}}}},
        {"const": {"$ref": "#/const"}},
        {"properties": {"$ref": {"const": "#"}}},
        {"$ref": "#/"},
        {"$ref": "#/none"},
        {"$ref": "#anchor"},
        {"$ref": "other.json"},
        {"$ref": 5},
    ],
)
def test_other_references_are_fine(schema: dict[str, Any]) -> None:
    """For a part of a value, or twice; and what is wrong in another way is said elsewhere."""
    check_references(schema)


def test_long_references_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^\$ref: a reference has more than 10000 characters"):
        grammar.json_schema({"$ref": "#/" + "/" * 10_000})


def test_references_end_where_nothing_is() -> None:
    """However many of them there are."""
    schema = {"anyOf": [{"$ref": "#/none" + "/" * 9_990} for _ in range(400)]}
    before = thread_time()
    check_references(schema)
    assert thread_time() - before < 1


def test_long_ways_of_references_are_too_deep() -> None:
    links = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(20_000)}
    with pytest.raises(ValueError, match="too deep"):
        grammar.json_schema({"$ref": "#/$defs/0", "$defs": {**links, "20000": {}}})
    with pytest.raises(ValueError, match="too deep"):
        enforceable({"$ref": "#/$defs/0", "$defs": {**links, "20000": {}}})
