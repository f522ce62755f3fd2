"""Objects that list their properties have no others, where nothing else in a schema needs some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve import grammar
from hdserve.schema.closing import closed
from tests.engine.structured_output.test_grammar import GRAMMARS

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "string"}}, "required": ["b"]}
SHUT = {"additionalProperties": False}
KINDS = [
    {**A, "properties": {"kind": {"const": kind}, **A["properties"]}, "required": ["kind"]}
    for kind in ("x", "y")
]


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (A, {**A, **SHUT}),
        (B, {**B, **SHUT}),
        ({"type": ["object", "null"], "properties": {}}, None),
        ({**A, "minProperties": 1, "maxProperties": 3}, None),
        ({"properties": {"a": {"type": ["integer", "null"]}}, "minProperties": 1}, None),
        ({"properties": {"a": {"type": ["object", "null"]}, "b": {"type": []}}}, None),
        ({"properties": {"a": A}}, {"properties": {"a": {**A, **SHUT}}, **SHUT}),
        ({"properties": {"not": A}}, {"properties": {"not": {**A, **SHUT}}, **SHUT}),
        ({"items": A}, {"items": {**A, **SHUT}}),
        ({"prefixItems": [A, B]}, {"prefixItems": [{**A, **SHUT}, {**B, **SHUT}]}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **SHUT}, {**B, **SHUT}]}),
        ({"oneOf": KINDS}, {"oneOf": [{**kind, **SHUT} for kind in KINDS]}),
        (
            {"oneOf": [A, {"type": "null"}], "type": ["object", "null"]},
            {"oneOf": [{**A, **SHUT}, {"type": "null"}], "type": ["object", "null"]},
        ),
        ({"additionalProperties": A}, {"additionalProperties": {**A, **SHUT}}),
        (
            {"$ref": "#/$defs/a", "title": "t", "$defs": {"a": A}},
            {"$ref": "#/$defs/a", "title": "t", "$defs": {"a": {**A, **SHUT}}},
        ),
    ],
    ids=str,
)
def test_listed_properties_are_all(schema: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    """Wherever a schema has others in it."""
    assert closed(schema) == (wanted or {**schema, **SHUT})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "unevaluatedProperties": True},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {"properties": {"a": {"$ref": "#"}}, "minProperties": 1},
        {**A, "const": {"b": 1}},
        {"const": A, "default": A, "enum": [A]},
    ],
    ids=str,
)
def test_objects_that_may_need_others_stay_open(schema: dict[str, Any]) -> None:
    """What lists none, says itself what else there may be, or could not be without others."""
    assert closed(schema) == schema


@pytest.mark.parametrize(
    "part",
    [
        {"allOf": [A, B]},
        {"if": A, "then": B},
        {"not": A},
        {"dependentSchemas": {"a": B}},
        {"dependentRequired": {"a": ["b"]}},
        {"contains": A, "items": B},
        {"patternProperties": {"a": A, "b": B}},
        {"$ref": "#/$defs/a", "properties": {"b": {}}},
        {"$ref": "#/components/a"},
        {"$ref": "other.json"},
        {"anyOf": [A, B], "required": ["c"]},
        {"anyOf": [A], "oneOf": KINDS},
        {"anyOf": [B], "properties": {"c": {}}},
        {"oneOf": [A, B]},
        {"oneOf": [{**A, "required": ["a"]}, {**A, "required": ["b"]}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    ],
    ids=str,
)
def test_a_schema_in_which_several_hold_at_once_stays_as_it_is(part: dict[str, Any]) -> None:
    """All of it: what one of them lists may be what another needs."""
    schema = {"properties": {"part": {"items": part}}, "$defs": {"a": A}}
    assert closed(schema) == schema


def test_a_closed_object_ends_after_its_last_property() -> None:
    """In the grammar a comma behind it is refused, and one that says it is open goes on."""
    for extra, goes_on in (({}, False), ({"additionalProperties": True}, True)):
        state = GRAMMARS.state(grammar.json_schema({**A, **extra}))
        for token_id in b'{"a":1,':
            state.push(token_id)
        assert (state.error is None) is goes_on
    text = grammar.json_schema({"type": "object", "properties": {"o": A}})
    schema = json.loads(text)["grammars"][0]["json_schema"]
    assert schema["properties"]["o"]["additionalProperties"] is False


def test_forms_are_read_once_to_be_told_apart() -> None:
    """Not once for each two of them, which in an event loop would hold up all requests."""

    class Names(list[str]):
        num_read = 0

        def __iter__(self) -> Iterator[str]:
            self.num_read += 1
            return super().__iter__()

    names, types = Names(["a", "b", "kind"]), Names(["object"])
    forms = [
        {"type": types, "required": names, "properties": {"kind": {"const": f"{n}"}}}
        for n in range(64)
    ]
    assert closed({"oneOf": forms}) == {"oneOf": forms}  # "a" and "b" are listed nowhere
    assert 64 <= names.num_read <= 3 * 64
    assert 64 <= types.num_read <= 3 * 64


TEXTS = st.sampled_from([{"const": "x"}, {"enum": ["x", "y"]}, {"enum": ["z", 1]}, {}])
FORMS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["object", ["object"], ["object", "null"], "integer", "number"]),
        "required": st.sampled_from([[], ["kind"], ["kind", "of"]]),
        "properties": st.fixed_dictionaries({"kind": TEXTS, "of": TEXTS}),
    }
)


@given(st.lists(FORMS, min_size=2, max_size=5))
def test_forms_are_told_apart_as_each_two_of_them_are(forms: list[dict[str, Any]]) -> None:
    """By their types, or by a text that both have to have: what is so of each two is of all."""
    assert is_closed(forms) == all(is_closed(list(pair)) for pair in combinations(forms, 2))


def is_closed(forms: list[dict[str, Any]]) -> bool:
    """Whether a schema of these forms is closed, and so is what is beside them."""
    return closed({"oneOf": forms, "$defs": {"a": A}})["$defs"] != {"a": A}


def test_many_forms_stay_as_they_are() -> None:
    """Though of these each two could be told apart."""
    forms = [
        {"type": "object", "properties": {"kind": {"const": f"{n}"}}, "required": ["kind"]}
        for n in range(65)
    ]
    assert closed({"oneOf": forms}) == {"oneOf": forms}
    assert closed({"oneOf": forms[:64]}) != {"oneOf": forms[:64]}
