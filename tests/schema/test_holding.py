"""What grammars cannot hold is left out of a schema and named; the rest of it is held."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from hdserve import grammar
from hdserve.schema.holding import MAX_UNHELD, held
from tests.deployments.parsers.work import counted_calls
from tests.engine.counted_tokens import CountedTokens
from tests.engine.structured_output.test_grammar import SCHEMA

TOKENIZER = LLTokenizer("byte")
TEXT = {"type": "string"}
A: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}}
LIST: dict[str, Any] = {"type": "array", "items": TEXT}


def allows(text: str, answer: Any) -> bool:
    """Whether the JSON of an answer matches a grammar."""
    matcher = LLMatcher(TOKENIZER, text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = json.dumps(answer).encode()
    return matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting()


UNHELD: list[tuple[dict[str, Any], list[str], Any, Any]] = [
    ({**LIST, "uniqueItems": True}, ["uniqueItems"], ["a", "a"], [1]),
    ({**LIST, "contains": {"const": "x"}}, ["contains"], ["a"], [1]),
    (
        {**LIST, "contains": {"const": "x"}, "minContains": 2, "maxContains": 3},
        ["contains", "maxContains", "minContains"],
        [],
        [1],
    ),
    ({**TEXT, "not": {"const": "x"}}, ["not"], "x", 1),
    ({**A, "not": {"required": ["b"]}}, ["not"], {"a": "x", "b": 1}, {"a": 1}),
    (
        {**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": False},
        ["else", "if", "then"],
        {"a": "x", "b": 1},
        {"a": 1},
    ),
    ({**A, "dependentRequired": {"a": ["b"]}}, ["dependentRequired"], {"b": 1}, {"a": 1}),
    ({**A, "dependentSchemas": {"a": False}}, ["dependentSchemas"], {"a": "x"}, {"a": 1}),
    ({**A, "dependencies": {"a": ["b"]}}, ["dependencies"], {"a": "x", "b": 1}, {"a": 1}),
    (
        {"allOf": [A], "type": "object", "unevaluatedProperties": False},
        ["unevaluatedProperties"],
        {"a": "x", "b": 1},
        {"a": 1},
    ),
    (
        {**LIST, "allOf": [{"prefixItems": [TEXT]}], "unevaluatedItems": False},
        ["unevaluatedItems"],
        ["a", "b"],
        [1],
    ),
    (
        {"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": TEXT},
        ["propertyNames"],
        {"a": "x"},
        {"aa": 1},
    ),
    ({**A, "$dynamicRef": "#a"}, ["$dynamicRef"], {"a": "x"}, 1),
    ({**A, "$recursiveRef": "#"}, ["$recursiveRef"], {"a": "x"}, 1),
    ({**A, "$ref": "https://example.com/a.json"}, ["$ref"], {"a": "x"}, 1),
    ({**TEXT, "pattern": "^(?!a)"}, ["pattern"], "abc", 1),
    ({**TEXT, "pattern": r"\bx", "format": "date"}, ["pattern"], "2026-01-31", "x"),
    (
        {"patternProperties": {"^(?=a)": TEXT, "^b": TEXT}, "additionalProperties": False},
        ["additionalProperties", "patternProperties"],
        {"ab": 1},
        {"b": 1},
    ),
    (
        {"oneOf": [TEXT, {"enum": ["a", 1]}, {"type": "null"}]},
        ["oneOf"],
        "a",
        2,
    ),
    (
        {**A, "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "anyOf": [{"type": "object"}]},
        ["oneOf"],
        {"a": "x", "b": 1},
        {"a": 1},
    ),
    ({"type": "integer", "maximum": 2**64 - 1, "minimum": 0}, ["maximum"], 2**62, -1),
    ({"type": "integer", "multipleOf": 1_000_000}, ["multipleOf"], 7, "a"),
    ({"type": "integer", "enum": [1, 2**60 + 1]}, ["enum"], 7, "a"),
    (
        {**A, "properties": {"a": TEXT, "b": TEXT}, "minProperties": 2},
        ["minProperties"],
        {"a": "x"},
        {"a": 1},
    ),
    (
        {**A, "minProperties": 3, "maxProperties": 4},
        ["maxProperties", "minProperties"],
        {"b": 1},
        1,
    ),
]


@pytest.mark.parametrize(("schema", "paths", "allowed", "refused"), UNHELD, ids=str)
def test_what_is_left_out_is_named(
    schema: dict[str, Any], paths: list[str], allowed: Any, refused: Any
) -> None:
    """And what it alone forbids is allowed, but not what the rest forbids."""
    found = held(schema)
    assert found.unheld == tuple(paths)
    text = grammar.json_schema(found.schema)
    assert allows(text, allowed)
    assert not allows(text, refused)
    with pytest.raises(ValueError, match=r"cannot be enforced: |too large|more digits"):
        grammar.json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"tags": {"uniqueItems": True}}}, "properties.tags.uniqueItems"),
        (
            {"items": {"anyOf": [{"type": "null"}, {"not": {}}]}},
            "items.anyOf.not",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"additionalProperties": {"not": {}}}}},
            "$defs.a.additionalProperties.not",
        ),
        ({"properties": {"x" * 100: {"not": {}}}}, f"properties.{'x' * 61}....not"),
    ],
    ids=str,
)
def test_paths_lead_to_the_keyword(schema: dict[str, Any], path: str) -> None:
    """Without the indices of lists, as those of other fields."""
    assert held(schema).unheld == (path,)


def test_what_is_named_is_bounded() -> None:
    """However deep and long a schema is."""
    schema: dict[str, Any] = {"not": {}}
    for _ in range(50):
        schema = {"properties": {"x" * 100: schema}}
    (path,) = held(schema).unheld
    assert len(path) < 250
    assert path.startswith("properties.xxx")
    assert path.endswith(".not")
    many: dict[str, Any] = {"properties": {str(index): {"not": {}} for index in range(1000)}}
    assert len(held(many).unheld) == MAX_UNHELD


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        {**LIST, "uniqueItems": False},
        {**A, "propertyNames": {"type": "string"}},
        {"then": False, "else": False, "minContains": 2, "maxContains": 3},
        {"if": {"type": "string"}, "$dynamicAnchor": "a", "$recursiveAnchor": True},
        {"dependentRequired": {}, "dependentSchemas": {}, "unevaluatedProperties": True},
        {**TEXT, "format": "frob", "x-guidance": {"lenient": True}},
        {**A, "$defs": {"unused": {"not": {}}}},
        {"properties": {"not": TEXT, "if": {"const": {"not": {}}}}},
    ],
    ids=str,
)
def test_what_allows_everything_is_not_named(schema: dict[str, Any]) -> None:
    assert held(schema).unheld == ()
    assert not LLMatcher.validate_grammar(grammar.json_schema(schema))


class Level(Enum):
    low = "low"
    high = "high"


class Plan(BaseModel):
    days: dict[Literal["mon", "fri"], int]
    levels: dict[Level, bool]
    only: dict[Literal["x"], str]


def test_listed_names_are_the_properties() -> None:
    """As pydantic writes dictionaries whose keys are constants, or members of an enumeration."""
    text = grammar.json_schema(Plan.model_json_schema())
    plan = {"days": {"fri": 2}, "levels": {"low": True, "high": False}, "only": {}}
    assert allows(text, plan)
    for part in ({"days": {"sat": 2}}, {"days": {"mon": "2"}}, {"levels": {"mid": True}}):
        assert not allows(text, {**plan, **part})


@pytest.mark.parametrize("names", [{"enum": ["a", "b", 5]}, {"$ref": "#/$defs/names"}], ids=str)
def test_listed_names_are_required_where_the_schema_says_so(names: dict[str, Any]) -> None:
    """As zod writes records, each of whose keys is required; a name of its own has its schema."""
    schema = {
        "type": "object",
        "propertyNames": names,
        "properties": {"b": {"type": "null"}, "c": TEXT},
        "additionalProperties": {"type": "integer"},
        "required": ["a", "b"],
        "$defs": {"names": {"type": "string", "enum": ["a", "b"], "title": "names"}},
    }
    text = grammar.json_schema(schema)
    assert allows(text, {"a": 1, "b": None})
    for answer in ({"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": None, "c": "x"}):
        assert not allows(text, answer)


def test_lists_of_names_stay_small() -> None:
    """However often one is referred to, or however much each name stands for."""
    names = [str(number) for number in range(20_000)]
    listed = {"propertyNames": {"$ref": "#/$defs/n"}}
    schema = {"$defs": {"n": {"enum": names}}, "anyOf": [listed] * 5_000}
    found = held(schema)
    assert found.unheld == ("anyOf.propertyNames",)
    assert sum("properties" in form for form in found.schema["anyOf"]) == 2
    other = {"anyOf": [{}] * 20_000}
    large = {"propertyNames": {"enum": names}, "additionalProperties": other}
    assert held(large).unheld == ("propertyNames",)


@pytest.mark.parametrize(
    ("names", "is_held"),
    [([1] * 300, True), (["a"] * 300, True), ([str(number) for number in range(25_001)], False)],
    ids=["numbers", "one name", "too many names"],
)
def test_a_list_of_names_is_read_a_few_times(names: list[Any], *, is_held: bool) -> None:
    """However many places refer to it, and whether they can be held or not."""
    counted = CountedTokens(names)
    place = {"propertyNames": {"$ref": "#/$defs/n"}, "additionalProperties": {"type": "null"}}
    found = held({"$defs": {"n": {"enum": counted}}, "anyOf": [place] * 100})
    assert found.unheld == (() if is_held else ("anyOf.propertyNames",))
    assert counted.num_read <= 3 * len(names)


def test_what_many_lists_of_names_are_for_is_counted_a_few_times() -> None:
    """At however many levels."""
    names = [str(number) for number in range(20)]
    schema: dict[str, Any] = {"enum": [1] * 3_000}
    for _ in range(90):
        schema = {"propertyNames": {"enum": names}, "additionalProperties": schema}
    with counted_calls() as calls:
        found = held(schema)
    assert found.unheld[-1] == "propertyNames"
    assert calls["walk"] < 100_000


def test_what_is_in_a_keyword_that_is_written_in_other_words_is_named() -> None:
    schema = {**A, "unevaluatedProperties": {"type": "array", "uniqueItems": True}}
    assert held(schema).unheld == ("unevaluatedProperties.uniqueItems",)


def test_references_into_alternatives_lead_there() -> None:
    forms = {"oneOf": [{"type": "string"}, {"type": "null"}]}
    schema = {"properties": {"a": forms, "b": {"$ref": "#/properties/a/oneOf/0"}}}
    text = grammar.json_schema(schema)
    assert allows(text, {"a": None, "b": "x"})
    assert not allows(text, {"a": None, "b": None})


def test_what_nothing_else_evaluates_is_additional() -> None:
    """So that it is held, in other words."""
    text = grammar.json_schema({**A, "unevaluatedProperties": {"type": "integer"}})
    assert allows(text, {"a": "x", "b": 1})
    assert not allows(text, {"a": "x", "b": "y"})
    text = grammar.json_schema({"prefixItems": [TEXT], "unevaluatedItems": False})
    assert allows(text, ["a"])
    assert not allows(text, ["a", "b"])


def test_alternatives_that_exclude_each_other_are_held() -> None:
    """Those given by reference, too."""
    forms = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"const": 1}, {"const": 2}]
    text = grammar.json_schema({"oneOf": forms, "$defs": {"a": TEXT, "b": LIST}})
    assert all(allows(text, answer) for answer in ("a", ["a"], 1, 2))
    assert not allows(text, 3)


VALUES = st.recursive(
    st.sampled_from([None, True, 1, 2, "a", "bb"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    ),
    max_leaves=5,
)
LEAVES = st.sampled_from(
    [True, TEXT, {"type": "integer"}, {"enum": ["a", 1]}, {"pattern": "^(?!a)"}, {"minimum": 2}]
)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True)
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=2)
    forms = st.lists(inner, min_size=1, max_size=3)
    keywords = {
        "properties": named,
        "required": names,
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^(?=a)", "^b"]), inner, max_size=2),
        "propertyNames": names.map(lambda found: {"enum": found}) | inner,
        "dependentRequired": st.dictionaries(st.sampled_from(["a", "b"]), names, max_size=1),
        "unevaluatedProperties": inner,
        "minProperties": st.integers(0, 3),
        "maxProperties": st.integers(0, 3),
        "items": inner,
        "uniqueItems": st.booleans(),
        "contains": inner,
        "not": inner,
        "if": inner,
        "then": inner,
        "oneOf": forms,
        "anyOf": forms,
        "allOf": forms,
    }
    pairs = [st.tuples(st.just(name), value) for name, value in keywords.items()]
    return st.lists(st.one_of(pairs), min_size=1, max_size=4).map(dict)


@given(st.recursive(LEAVES, _schemas, max_leaves=8).filter(lambda found: found is not True), VALUES)
def test_the_rest_allows_all_that_the_schema_allows(schema: dict[str, Any], value: Any) -> None:
    """And exactly that where nothing is left out."""
    validator = jsonschema.Draft202012Validator
    found = held(schema)
    was_valid, is_valid = validator(schema).is_valid(value), validator(found.schema).is_valid(value)
    assert is_valid or not was_valid
    assert found.unheld or is_valid == was_valid
