"""Calls of elements are read as JSON of the types that the functions say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.parsers.call_elements import GLM, QWEN, Elements
from deployments.parsers.call_reader import Arguments, CallBegin
from deployments.parsers.tool_parser import Function, Part, ToolParser
from deployments.parsers.tool_parsers import GlmToolParser, Qwen3CoderToolParser
from deployments.parsers.xml_call_reader import ArgumentTypes, types_of, value_of, xml_call_reader
from tests.deployments.parsers.calls import ToolCall, joined
from tests.deployments.parsers.work import CountedText, CountingRe, counted_calls

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "guests": {"type": "integer"},
    "price": {"type": "number"},
    "is_late": {"type": "boolean"},
    "tags": {"type": "array"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "day": {"enum": ["1", "2"]},
    "any": {},
}
FUNCTIONS = [Function("book", {"type": "object", "properties": PROPERTIES})]


def call(*parameters: tuple[str, str], name: str = "book") -> str:
    elements = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters]
    return f"<tool_call>\n<function={name}>\n{''.join(elements)}</function>\n</tool_call>"


def glm_call(*arguments: tuple[str, str], name: str = "book") -> str:
    elements = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments
    ]
    return f"<tool_call>{name}\n{''.join(elements)}</tool_call>"


BARE = call(("city", "a")).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
SIZES = (1, 3, 1000)
FAMILIES: list[tuple[type[ToolParser], Callable[..., str]]] = [
    (Qwen3CoderToolParser, call),
    (GlmToolParser, glm_call),
]


def read(
    text: str, size: int, family: type[ToolParser] = Qwen3CoderToolParser
) -> tuple[str, list[ToolCall]]:
    parser = family(FUNCTIONS)
    parts: list[Part] = []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    return joined([*parts, *parser.finish()])


VALUES: list[tuple[str, str, Any]] = [
    ("city", "San Jose", "San Jose"),
    ("city", "5", "5"),
    ("city", 'a\n"b"\n  é \\', 'a\n"b"\n  é \\'),
    ("city", "a</para", "a</para"),
    ("city", "</tool_call></function>", "</tool_call></function>"),
    ("city", "a <parameter=city>\n </function>", "a <parameter=city>\n </function>"),
    ("city", "", ""),
    ("city", "\n", "\n"),
    ("city", "\na\n", "\na\n"),
    ("guests", "5", 5),
    ("guests", "five", "five"),
    ("price", "5", 5),
    ("price", "NaN", "NaN"),
    ("price", "1e999", "1e999"),
    ("is_late", "True", True),
    ("is_late", "false", False),
    ("is_late", "1", "1"),
    ("tags", '["a", 1]', ["a", 1]),
    ("note", "null", None),
    ("note", "5", "5"),
    ("note", '"a"', '"a"'),
    ("day", "1", "1"),
    ("any", "[1]", [1]),
    ("any", "text", "text"),
    ("other", "1", "1"),
]


@pytest.mark.parametrize(("family", "call_of"), FAMILIES)
@pytest.mark.parametrize(("name", "written", "value"), VALUES)
def test_values_are_of_the_type_of_their_parameter(
    name: str, written: str, value: Any, family: type[ToolParser], call_of: Callable[..., str]
) -> None:
    """Where they can be; else they are the text they are."""
    for size in SIZES:
        plain, (found,) = read(f"Well. {call_of((name, written))}", size, family)
        assert (plain, found.name) == ("Well.", "book"), size
        arguments = json.loads(found.arguments)
        assert arguments == {name: value}, size
        assert type(arguments[name]) is type(value), size


CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (call(), "", [("book", {})]),
    (call(("city", "a"), ("guests", "2")), "", [("book", {"city": "a", "guests": 2})]),
    (f"{call()}\n{call(name='g')}", "", [("book", {}), ("g", {})]),
    (
        "<tool_call><function=g></function><function=h></function></tool_call> so",
        " so",
        [("g", {}), ("h", {})],
    ),
    ("<tool_call><function=g><parameter=a>b</parameter></tool_call>.", ".", [("g", {"a": "b"})]),
    (
        '<tool_call>{"name": "g", "arguments": {}}<function=h></function></tool_call>',
        "<function=h></function>",
        [("g", {})],
    ),
    (
        '<tool_call>{"name": "g", "arguments": {"a": "<function=h>"}}</tool_call>',
        "",
        [("g", {"a": "<function=h>"})],
    ),
    (
        "<tool_call><function=book>\n<parameter=city>\na\n\n<parameter=guests>\n2\n</function>"
        "</tool_call>.",
        ".",
        [("book", {"city": "a", "guests": 2})],
    ),
    (
        "<tool_call><function=book><parameter=guests>\n<parameter=city>\n</function></tool_call>"
        f"\n{call(name='g')}",
        "",
        [("book", {"guests": "", "city": ""}), ("g", {})],
    ),
    ("<tool_call>\n<function=g", "<tool_call>\n<function=g", []),
    # Without the mark before it, where it is one of the functions.
    (BARE, "", [("book", {"city": "a"})]),
    (f"I will look.\n\n{BARE}\n</tool_call>\nSo.", "I will look.\nSo.", [("book", {"city": "a"})]),
    (
        f"{BARE}\n{BARE}\n</tool_call>\n{call()}.",
        ".",
        [*[("book", {"city": "a"})] * 2, ("book", {})],
    ),
    (f"{BARE} and {BARE}</tool", " and", [("book", {"city": "a"})] * 2),
    (f"{call()}\nWell. {BARE}", "\nWell.", [("book", {}), ("book", {"city": "a"})]),
    (f"In `<tool_call>`: {BARE}</tool_call>", "In `<tool_call>`:", [("book", {"city": "a"})]),
    ("<function=book></function></tool_call></tool_call>", "</tool_call>", [("book", {})]),
    ("<function=book><parameter=city>a</parameter></tool_call> b", " b", [("book", {"city": "a"})]),
    *(
        (text, text, [])
        for text in (
            "<function=g></function>",
            "<function=g>\n<parameter=city>a</parameter></function></tool_call>",
            "Write `<function=NAME>`, as in <function=book>, then <parameter=city>. </function>",
            "<function=book>\n",
            "<function=book>\n<param",
            "<function=boo",
            "a < b <function",
        )
    ),
    (
        "<tool_call><function=g>noise < <parameter=a>b</parameter></function>",
        "",
        [("g", {"a": "b"})],
    ),
]


@pytest.mark.parametrize(("text", "plain", "calls"), CALLS)
def test_calls_are_read(text: str, plain: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Also where a mark is missing, or they are JSON, which a call that is required is."""
    for size in SIZES:
        found_plain, found = read(text, size)
        assert found_plain == plain, size
        assert [(item.name, json.loads(item.arguments)) for item in found] == calls, size


GLM_CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (glm_call(), "", [("book", {})]),
    ("<tool_call>g</tool_call>", "", [("g", {})]),
    (glm_call(("city", "a"), ("guests", "2")), "", [("book", {"city": "a", "guests": 2})]),
    (glm_call(("city", "a")).replace("\n", "") + " so", " so", [("book", {"city": "a"})]),
    (f"{glm_call()}\n{glm_call(name='g')}", "", [("book", {}), ("g", {})]),
    (glm_call(("city", "</tool_call>")), "", [("book", {"city": "</tool_call>"})]),
    ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', "", [("g", {})]),
    ("<tool_call>book\n", "<tool_call>book\n", []),
    ("<tool_call> is a mark.", "<tool_call> is a mark.", []),
]


@pytest.mark.parametrize(("text", "plain", "calls"), GLM_CALLS)
def test_calls_of_glm_are_read(
    text: str, plain: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """With line breaks between their elements and without."""
    for size in SIZES:
        found_plain, found = read(text, size, GlmToolParser)
        assert found_plain == plain, size
        assert [(item.name, json.loads(item.arguments)) for item in found] == calls, size


PIECES = [
    *("<tool_call>", "</tool_call>", "\n", "5", "a", "<", "</", '"', " ", "é"),
    '{"name": "g", "arguments": {}}',
]
QWEN_PIECES = [
    *PIECES,
    *("<function=book>", "</function>", "</parameter>", "<parameter=city>", "<parameter=guests>"),
]
GLM_PIECES = [
    *PIECES,
    *("book", "city", "guests", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]


@pytest.mark.parametrize(
    ("family", "pieces"), [(Qwen3CoderToolParser, QWEN_PIECES), (GlmToolParser, GLM_PIECES)]
)
@given(data=st.data())
def test_cuts_change_nothing(
    family: type[ToolParser], pieces: list[str], data: st.DataObject
) -> None:
    """A stream gives what the whole answer gives, with the mark at its beginning and without."""
    opening = data.draw(st.sampled_from(["<tool_call>", ""]))
    text = opening + "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=16)))
    size = data.draw(st.integers(1, 20))
    assert read(text, size, family) == read(text, 1000, family)


def test_texts_are_streamed_as_they_come() -> None:
    """Others when they are complete."""
    parser = Qwen3CoderToolParser(FUNCTIONS)
    assert parser.push("<tool_call>\n<function=book>") == [CallBegin("book")]
    assert parser.push("\n<parameter=city>\nSan") == [Arguments('{"city": "San', is_last=False)]
    assert parser.push(' "Jo\n</p') == [Arguments(r" \"Jo", is_last=False)]
    assert parser.push("arameter>") == [Arguments('"', is_last=False)]
    assert parser.push("<parameter=guests>5") == [Arguments(', "guests": ', is_last=False)]
    assert parser.push("</parameter>") == [Arguments("5", is_last=False)]
    assert parser.push("</function>") == [Arguments("}", is_last=True)]
    assert parser.push("</tool_call>") == parser.finish() == []


def test_calls_without_a_mark_are_streamed_as_they_come() -> None:
    """From their first element on: until then, and behind them, nothing is shown that may belong to
    them."""
    parser = Qwen3CoderToolParser(FUNCTIONS)
    assert parser.push("I will. <func") == ["I will."]
    assert parser.push("tion=book") == parser.push(">\n") == parser.push("<param") == []
    assert parser.push("eter=city>\na") == [
        CallBegin("book"),
        Arguments('{"city": "a', is_last=False),
    ]
    assert parser.push("\n</parameter>\n</function>") == [Arguments('"}', is_last=True)]
    assert parser.push("\n</tool_") == []
    assert parser.push("call>So <function=f") == ["So"]
    assert parser.push(">") == [" <function=f>"]
    assert parser.push("<function=book> ") == []
    assert parser.push("is") == ["<function=book> is"]
    assert parser.finish() == []


@given(st.lists(st.sampled_from(QWEN_PIECES), max_size=16), st.integers(1, 20))
def test_what_is_given_out_stays(pieces: list[str], size: int) -> None:
    """What the beginning of an answer made certain, its text and its calls, the answer begins
    with."""
    text = "".join(pieces)
    parser = Qwen3CoderToolParser(FUNCTIONS)
    plain, calls = read(text, 1000)
    parts: list[Part] = []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
        so_far, calls_so_far = joined(parts)
        assert plain.startswith(so_far)
        for begun, whole in zip(calls_so_far, calls, strict=False):
            assert begun.name == whole.name
            assert whole.arguments.startswith(begun.arguments)
        assert len(calls_so_far) <= len(calls)


def test_types_of_schemas() -> None:
    assert types_of({"type": ["integer", "null"]}) == {"integer", "null"}
    assert types_of({"oneOf": [{"type": "string"}, {}]}) is None
    assert types_of({"const": "a"}) == {"string"}
    assert types_of(True) is None
    many = [{"type": "string"}] * 500
    assert types_of({"anyOf": many}) == {"string"}
    assert types_of({"anyOf": 3 * many}) is None
    assert types_of({"type": "string", "anyOf": 3 * many}) == {"string"}
    assert value_of("[" * 100_000, None) == "[" * 100_000


REFERENCES: list[tuple[Any, set[str] | None]] = [
    ("#/$defs/zip", {"string"}),
    ("#/$defs/a~1b c", {"string"}),
    ("#/$defs/a~1b%20c", {"string"}),
    ("#/$defs/list", {"string", "null"}),
    ("#/$defs/loop", {"integer"}),
    ("#/$defs/self", set()),
    ("#/$defs/long0", None),
    ("#/$defs/wide0", {"boolean"}),
    ("#/$defs/none", None),
    ("#/$defs/zip/enum/0", None),
    ("#/$defs/list/anyOf/0", {"string"}),
    ("#" + "/a" * 5000, None),
    ("#anchor", None),
    ("#", {"object"}),
    ("other.json#/a", None),
    (5, None),
]


@pytest.mark.parametrize(("reference", "types"), REFERENCES)
def test_references_are_followed(reference: Any, types: set[str] | None) -> None:
    """Within a schema, each of them once."""
    definitions: dict[str, Any] = {
        "zip": {"enum": ["10115"]},
        "a/b c": {"$ref": "#/$defs/zip"},
        "list": {"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "integer"}]},
        "self": {"$ref": "#/$defs/self"},
        "wide40": {"type": "boolean"},
    }
    for index in range(2000):
        definitions[f"long{index}"] = {"$ref": f"#/$defs/long{index + 1}"}
    for index in range(40):
        definitions[f"wide{index}"] = {"oneOf": [{"$ref": f"#/$defs/wide{index + 1}"}] * 2}
    root = {"type": "object", "$defs": definitions}
    assert types_of({"$ref": reference}, root) == types


def test_types_are_those_of_all_schemas() -> None:
    both = [{"type": ["number", "string"]}, {"type": ["integer", "null"]}, {}]
    assert types_of({"allOf": both}) == {"integer"}
    assert types_of({"allOf": [{}]}) is None
    assert types_of({"type": "string", "anyOf": [{}, {"type": "null"}]}) == {"string"}


def test_arguments_of_referenced_types() -> None:
    properties = {"zip": {"$ref": "#/$defs/zip"}, "n": {"allOf": [{"$ref": "#/$defs/n"}]}}
    definitions = {"zip": {"enum": ["10115"]}, "n": {"type": "integer"}}
    parser = Qwen3CoderToolParser([Function("f", {"properties": properties, "$defs": definitions})])
    text = call(("zip", "10115"), ("n", "2"), name="f")
    _, (found,) = joined([*parser.push(text), *parser.finish()])
    assert json.loads(found.arguments) == {"zip": "10115", "n": 2}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/definitions/Args"},
        {"anyOf": [{"type": "null"}, {"$ref": "#/definitions/Args"}]},
        {"allOf": [{"properties": {"m": {}}}, {"allOf": [{"$ref": "#/definitions/Args"}]}]},
        {
            "$ref": "#/definitions/Args",
            "anyOf": [{"properties": {"s": {"minLength": 1}, "n": True}}, {"required": ["s"]}],
        },
        {"$ref": "#/definitions/Args", "allOf": [{"$ref": "#/" + "x" * 10_001}]},
    ],
)
def test_arguments_of_types_that_the_root_refers_to(parameters: dict[str, Any]) -> None:
    """As of what zod makes of a schema with a name; a circle ends."""
    properties = {"n": {"type": "integer"}, "tags": {"type": "array"}, "s": {"type": "string"}}
    args = {"allOf": [{"properties": properties}, {"$ref": "#/definitions/Args"}]}
    function = Function("f", {**parameters, "definitions": {"Args": args}})
    parser = Qwen3CoderToolParser([function])
    text = call(("n", "5"), ("tags", '["a"]'), ("s", "5"), ("t", "5"), name="f")
    _, (found,) = joined([*parser.push(text), *parser.finish()])
    assert json.loads(found.arguments) == {"n": 5, "tags": ["a"], "s": "5", "t": "5"}


@pytest.mark.parametrize(("family", "call_of"), FAMILIES)
def test_the_types_of_an_argument_are_worked_out_once(
    family: type[ToolParser], call_of: Callable[..., str]
) -> None:
    """For all calls of an answer: a schema may have many values, and a name be written often."""

    class Schema(dict[str, Any]):
        num_read = 0

        def get(self, key: str, default: Any = None) -> Any:
            self.num_read += key == "type"
            return super().get(key, default)

    schema = Schema(type="integer")
    parser = family([Function("book", {"properties": {"n": schema}})])
    text = call_of(*[("n", "1")] * 5) * 3
    _, calls = joined([*parser.push(text), *parser.finish()])
    assert [json.loads(item.arguments) for item in calls] == [{"n": 1}] * 3
    assert schema.num_read == 1


def test_noise_between_arguments_is_passed_over_at_once() -> None:
    """However long it is, and without a copy of the rest for each character."""
    parser = Qwen3CoderToolParser()
    with counted_calls() as calls:
        parts = parser.push(f"<tool_call><function=f>{'noise ' * 1000}<parameter=a>b</parameter>")
    assert joined(parts) == ("", [ToolCall("f", '{"a": "b"')])
    assert calls.total() < 300


WHOLE_VALUES = [
    (QWEN, "<function=f><parameter=n>", "</parameter></function>"),
    (GLM, "f<arg_key>n</arg_key><arg_value>", "</arg_value></tool_call>"),
]


@pytest.mark.parametrize("piece", ["12 ", "a\n</func", "</arg_value"])
@pytest.mark.parametrize(("elements", "before", "after"), WHOLE_VALUES)
def test_a_value_that_is_read_as_a_whole_is_looked_through_once(
    elements: Elements, before: str, after: str, piece: str
) -> None:
    """But for the end of what has come, which may begin a mark, however many tokens it has."""
    types = ArgumentTypes([Function("f", {"properties": {"n": {"type": "array"}}})])
    reader = xml_call_reader("</tool_call>", types, elements)
    reader.kept = kept = CountedText("")
    parts = reader.push(before)
    for _ in range(500):
        parts += reader.push(piece)
    for char in after:
        parts += reader.push(char)
    assert joined(parts) == ("", [ToolCall("f", json.dumps({"n": piece * 500}))])
    assert kept.counts["characters"] < 500 * 5 * (len(piece) + 15)


NAMES = [
    (QWEN, "<function=f><parameter=", ">1</parameter></function>", "<para"),
    (GLM, "f<arg_key>", "</arg_key>\n <arg_value>1</arg_value></tool_call>", "</arg_key"),
    (GLM, "f<arg_key>", "</arg_key><arg_value>1</arg_value></tool_call>", "</arg_key> <arg"),
]


@pytest.mark.parametrize(("elements", "before", "after", "piece"), NAMES)
def test_the_name_of_an_argument_is_looked_through_once(
    elements: Elements, before: str, after: str, piece: str
) -> None:
    """But for the end of what has come, which may begin what is behind it."""
    counts = CountingRe()
    counted = elements._replace(named=counts.compile(elements.named.pattern))
    reader = xml_call_reader("</tool_call>", ArgumentTypes(()), counted)
    parts = reader.push(before)
    for text in [*[piece] * 500, *after]:
        parts += reader.push(text)
    assert joined(parts) == ("", [ToolCall("f", json.dumps({piece * 500: "1"}))])
    assert counts.num_characters < 500 * 3 * len(piece)
