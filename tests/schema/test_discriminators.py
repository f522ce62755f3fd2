"""A property that tells the forms of a schema apart is required in each of them."""

from __future__ import annotations

import copy
import json
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, Field

from deployments.parsers.tool_parser import Function
from deployments.parsers.tool_parsers import HermesToolParser, MistralArgsToolParser
from hdserve import grammar
from hdserve.schema.discriminators import told_apart
from tests.engine.structured_output.test_grammar import GRAMMARS, answers


class Circle(BaseModel):
    kind: Literal["circle", "disc"] = "circle"
    radius: Literal[1, 2]


class Group(BaseModel):
    kind: Literal["group"]
    name: Literal["a", "b"]
    parts: list[Shape] = Field(default=[], max_length=1)


Shape = Annotated[Circle | Group, Field(discriminator="kind")]


class Drawing(BaseModel):
    shape: Shape
    other: Circle


SCHEMA = Drawing.model_json_schema()
INLINE: dict[str, Any] = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "n": {"type": "integer"}}}
        for kind in ("a", "b")
    ],
    "discriminator": {"propertyName": "kind"},
}


def allows(text: str, answer: str) -> bool:
    """Whether a grammar allows so much of an answer."""
    state = GRAMMARS.state(text)
    for token_id in answer.encode():
        state.push(token_id)
    return state.error is None


def test_unions_of_pydantic_whose_constants_have_defaults_are_held() -> None:
    """What is written is one of the forms, which may be in one another, with its constant."""
    text = grammar.json_schema(SCHEMA)
    assert not LLMatcher.validate_grammar(text)
    assert allows(text, '{"shape":{"kind":"group","name":"a","parts":[{"kind":"disc","radius":')
    assert not allows(text, '{"shape":{"radius":')
    assert not allows(text, '{"shape":{"kind":"circle","name":')
    assert not allows(text, '{"shape":{"kind":"group","name":"a","parts":[{"radius":')
    assert allows(text, '{"shape":{"kind":"disc","radius":1},"other":{"radius":')


def test_answers_are_of_the_model_of_pydantic() -> None:
    sequences, texts = answers((), grammar.json_schema(SCHEMA), temperature=1.0)
    finished = [
        text
        for sequence, text in zip(sequences, texts, strict=True)
        if sequence.finish_reason == "stop"
    ]
    assert finished
    for text in finished:
        assert Drawing.model_validate_json(text)


@pytest.mark.parametrize("parser", [HermesToolParser, MistralArgsToolParser])
def test_tools_have_such_parameters(parser: type[HermesToolParser]) -> None:
    """Whose references begin elsewhere in the schema of a call."""
    text = parser.grammar([Function("draw", SCHEMA)], is_one=True)
    assert not LLMatcher.validate_grammar(grammar.with_marks(text, lambda _: None))


def test_what_the_client_sent_stays() -> None:
    """As do definitions, which may be used elsewhere."""
    before = copy.deepcopy(SCHEMA)
    found = told_apart(SCHEMA)
    assert before == SCHEMA
    assert found["$defs"]["Circle"] == SCHEMA["$defs"]["Circle"]
    assert found["properties"]["other"] == {"$ref": "#/$defs/Circle"}
    assert told_apart(found) == found


def test_definitions_are_written_once_however_they_are_spelled() -> None:
    """Else a schema of 400 kB would take gigabytes."""
    schema = {
        "$defs": {"abc": {"properties": {"kind": {"const": "x"}}}},
        "anyOf": [
            {"discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": f"#/$defs/{name}"}]}
            for name in ("abc", "%61bc", "a%62c", "%61%62%63")
        ],
    }
    found = told_apart(schema)
    assert [*found["$defs"]] == ["abc", "form_0"]
    assert [item["anyOf"] for item in found["anyOf"]] == [[{"$ref": "#/$defs/form_0"}]] * 4


def test_parts_of_definitions_are_not_written_again() -> None:
    """Else each level of a deep one would hold all that are below it once more."""
    form = {"properties": {"kind": {"const": "x"}}}
    schema = {
        "$defs": {"a": {"properties": {"b": form}}},
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/a%2Fproperties%2Fb"}],
    }
    assert told_apart(schema) == schema


def test_more_than_a_grammar_is_made_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where definitions are written again."""
    schema = {"$defs": {"form": INLINE["oneOf"][0]}, **INLINE}
    schema["oneOf"] = [{"$ref": "#/$defs/form"}]
    monkeypatch.setattr("hdserve.schema.size._MAX_VALUES", 5)
    with pytest.raises(ValueError, match="more than 5 values"):
        grammar.json_schema(schema)


def test_forms_that_are_written_out_have_it_required() -> None:
    assert [form["required"] for form in told_apart(INLINE)["anyOf"]] == [["kind"]] * 2


def test_objects_are_closed_in_forms_that_are_told_apart() -> None:
    schema = json.loads(grammar.json_schema(SCHEMA))["grammars"][0]["json_schema"]
    assert all(item["additionalProperties"] is False for item in schema["$defs"].values())


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": INLINE["oneOf"]},
        {**INLINE, "discriminator": {"propertyName": "n"}},
        {**INLINE, "discriminator": {"propertyName": ["kind"]}},
        {**INLINE, "discriminator": "kind"},
        {**INLINE, "oneOf": [*INLINE["oneOf"], INLINE["oneOf"][0]]},
        {**INLINE, "oneOf": [*INLINE["oneOf"], {"type": "object"}]},
        {**INLINE, "oneOf": [*INLINE["oneOf"], True]},
        {**INLINE, "oneOf": [{**form, "required": "kind"} for form in INLINE["oneOf"]]},
        {**INLINE, "anyOf": [{}]},
        {**INLINE, "oneOf": [*INLINE["oneOf"], {"$ref": "#/$defs/none"}]},
        {**INLINE, "oneOf": [*INLINE["oneOf"], {"$ref": None}]},
        {**INLINE, "oneOf": [*INLINE["oneOf"], {"$ref": []}]},
        {**INLINE, "$defs": []},
        {"items": {**INLINE, "$id": "https://example.org/f"}},
        {**INLINE, "const": INLINE, "oneOf": None},
    ],
    ids=str,
)
def test_other_schemas_stay_as_they_are(schema: dict[str, Any]) -> None:
    """Where nothing tells the forms apart, or nothing says so."""
    assert told_apart(schema) == schema
