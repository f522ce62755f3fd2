"""Every way to ask for structured output becomes one grammar, or an error that names the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.openai.protocol import ChatBody, CompletionBody
from hdserve import grammar
from hdserve.errors import InvalidRequest, Unsupported

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

FORMS: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({}, None, None),
    ({"response_format": {"type": "text"}}, None, None),
    ({"response_format": {"type": "json_object"}}, grammar.json_object(), "response_format"),
    ({"response_format": FORMAT}, grammar.json_schema(SCHEMA), "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        grammar.json_object(),
        "response_format",
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        grammar.json_schema(SCHEMA),
        "structured_outputs",
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        grammar.json_schema(SCHEMA),
        "structured_outputs",
    ),
    ({"structured_outputs": {"regex": "a/b"}}, grammar.regex("a/b"), "structured_outputs"),
    ({"structured_outputs": {"json_object": True}}, grammar.json_object(), "structured_outputs"),
    ({"guided_json": SCHEMA}, grammar.json_schema(SCHEMA), "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, grammar.json_schema(SCHEMA), "guided_json"),
    ({"guided_regex": "a+"}, grammar.regex("a+"), "guided_regex"),
    ({"guided_choice": ["x", 'y"']}, grammar.choice(["x", 'y"']), "guided_choice"),
    (
        {"guided_choice": ["x"], "response_format": {"type": "text"}},
        grammar.choice(["x"]),
        "guided_choice",
    ),
]


@pytest.mark.parametrize(("fields", "text", "param"), FORMS)
def test_forms(fields: dict[str, Any], text: str | None, param: str | None) -> None:
    """Chat and completions alike."""
    bodies = (
        ChatBody.parse({"model": "m", "messages": USER, **fields}),
        CompletionBody.parse({"model": "m", "prompt": "x", **fields}),
    )
    for body in bodies:
        request = body.to_generation("r")
        assert request.sampling.get("grammar") == text
        assert request.grammar_param == param
        assert body.ignored == ()


UNIQUE = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
HELD = grammar.json_schema({"properties": {"tags": {"type": "array"}}})


def formatted(**fields: Any) -> dict[str, Any]:
    """A response format with a schema that cannot be held."""
    schema = {"name": "n", "schema": UNIQUE, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (formatted(), "response_format.json_schema.schema"),
        (formatted(strict=False), "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json"),
        ({"guided_json": json.dumps(UNIQUE)}, "guided_json"),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_left_out(fields: dict[str, Any], path: str) -> None:
    """Unless the schema is strict."""
    for body in (
        ChatBody.parse({"model": "m", "messages": USER, **fields}),
        CompletionBody.parse({"model": "m", "prompt": "x", **fields}),
    ):
        request = body.to_generation("r")
        assert request.sampling["grammar"] == HELD
        assert request.unheld == (f"{path}.properties.tags.uniqueItems",)


def test_a_strict_schema_is_held_or_refused() -> None:
    """The error says where the keyword is that cannot be held."""
    body = ChatBody.parse({"model": "m", "messages": USER, **formatted(strict=True)})
    with pytest.raises(Unsupported) as caught:
        body.to_generation("r")
    path = "response_format.json_schema.schema.properties.tags.uniqueItems"
    assert caught.value.message == f"this keyword cannot be enforced: {path}"
    assert caught.value.param == "response_format"


def test_a_path_is_text() -> None:
    """Whatever a client calls a property."""
    schema = {"name": "n", "schema": {"properties": {"\ud800": {"not": {}}}}, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    body = ChatBody.parse({"model": "m", "messages": USER, "response_format": form})
    with pytest.raises(Unsupported, match=r"properties\.\\ud800\.not$"):
        body.to_generation("r")


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object", "shcema": {}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_json": "\ud800"}, "guided_json"),
    ({"guided_json": '{"a": ' * 500 + "1" + "}" * 500}, "guided_json"),
    ({"guided_json": nested(2000)}, "guided_json"),
    ({"guided_choice": ["x"] * 1001}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_forms(fields: dict[str, Any], param: str) -> None:
    """An unknown form, an incomplete one and two at a time are refused by name."""
    with pytest.raises(InvalidRequest) as caught:
        ChatBody.parse({"model": "m", "messages": USER, **fields}).to_generation("r")
    assert caught.value.param == param
    assert len(caught.value.message) <= 300


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT, "guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        {"guided_json": json.dumps(SCHEMA), "guided_choice": ["a"]},
    ],
    ids=str,
)
def test_several_forms_are_refused_before_any_is_made(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar of a large schema takes time, in an event loop that all requests share."""
    made: list[Any] = []
    monkeypatch.setattr(grammar, "json_schema", made.append)
    with pytest.raises(InvalidRequest, match="one form"):
        ChatBody.parse({"model": "m", "messages": USER, **fields}).to_generation("r")
    assert not made


def test_grammars_of_clients_are_refused() -> None:
    """A client's context-free grammar could take the engine's thread for itself."""
    with pytest.raises(Unsupported):
        ChatBody.parse({"model": "m", "messages": USER, "guided_grammar": "start: a"})


NOTHING = {
    "json": None,
    "json_object": False,
    "grammar": None,
    "structural_tag": None,
    "whitespace_pattern": None,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "disable_fallback": False,
}
"""Fields of vLLM's structured outputs that ask for nothing."""


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "start: a"},
        {"structural_tag": "{}"},
        {"whitespace_pattern": " *"},
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
        {"disable_fallback": True},
    ],
)
def test_fields_of_structured_outputs_that_are_not_offered(fields: dict[str, Any]) -> None:
    """They are refused as such, and change nothing where they ask for nothing."""
    body = {"model": "m", "messages": USER}
    asked = NOTHING | {"regex": "a"}
    found = ChatBody.parse({**body, "structured_outputs": asked}).to_generation("r")
    assert found.sampling["grammar"] == grammar.regex("a")
    (name,) = fields
    with pytest.raises(Unsupported) as caught:
        ChatBody.parse({**body, "structured_outputs": asked | fields})
    assert caught.value.param == "structured_outputs"
    assert caught.value.message == f"structured_outputs.{name} is not supported"
