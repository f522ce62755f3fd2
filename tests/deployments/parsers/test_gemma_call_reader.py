"""Calls as Gemma writes them are read as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.parsers import gemma_call_reader
from deployments.parsers.call_reader import Arguments, CallBegin
from deployments.parsers.tool_parser import Part
from deployments.parsers.tool_parsers import GemmaToolParser
from tests.deployments.parsers.calls import ToolCall, joined
from tests.deployments.parsers.work import CountingRe

SIZES = (1, 3, 1000)


def read(text: str, size: int) -> tuple[str, list[ToolCall]]:
    parser = GemmaToolParser()
    parts: list[Part] = []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    return joined([*parts, *parser.finish()])


def written(value: Any) -> str:
    """As its chat template writes an argument."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


TEXTS = st.text(alphabet='<|">tol_ca{}[]:,\\\n é', max_size=12).filter(
    lambda text: '<|"|>' not in f'<|"|>{text}<|"|>'[1:-1]
)
KEYS = st.text(alphabet="abé_-.5 ", min_size=1, max_size=6).map(str.strip).filter(bool)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4), size=st.integers(1, 20))
def test_what_was_written_is_read(arguments: dict[str, Any], size: int) -> None:
    """Whatever is between the marks of a text, and wherever the answer is cut."""
    call = f"<|tool_call>call:f{written(arguments)}<tool_call|>"
    plain, (first, second) = read(f"Well. {call}{call}", size)
    assert plain == "Well."
    assert first == second
    assert first.name == "f"
    assert json.loads(first.arguments) == arguments


CALLS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("<|tool_call>call:f{}<tool_call|>", "", [("f", "{}")]),
    ("<|tool_call>call: f {a : 5 }<tool_call|> so", " so", [("f", '{"a": 5}')]),
    (
        "<|tool_call>call:f{a:None,b:True,c:Paris}<tool_call|>",
        "",
        [("f", '{"a": null, "b": true, "c": "Paris"}')],
    ),
    (r'<|tool_call>call:f{"a":"\"}\u00fc"}<tool_call|>', "", [("f", r'{"a": "\"}\u00fc"}')]),
    (
        '<|tool_call>call:f{<|"|>a b<|"|>:<|"|><tool_call|><|"|>}',
        "",
        [("f", '{"a b": "<tool_call|>"}')],
    ),
    ('<|tool_call>call:f{a:<|"|>b', "", [("f", '{"a": "b')]),
    ("<|tool_call>call:f{a:[1<tool_call|>.", ".", [("f", '{"a": [1')]),
    ("<|tool_call>call:f{a:1 < 2}<tool_call|>.", ".", [("f", '{"a": "1 < 2"}')]),
    ("<|tool_call>call:f{}}<tool_call|>.", "}.", [("f", "{}")]),
    ('<|tool_call>{"name": "f", "arguments": {}}<tool_call|>', "", [("f", "{}")]),
    ("<|tool_call>call:f", "<|tool_call>call:f", []),
    ("<|tool_call> is a mark.<tool_call|>", "<|tool_call> is a mark.<tool_call|>", []),
]


@pytest.mark.parametrize(("text", "plain", "calls"), CALLS)
def test_calls_are_read(text: str, plain: str, calls: list[tuple[str, str]]) -> None:
    """Also as JSON, or with what has no place there, which is given as it is."""
    for size in SIZES:
        found_plain, found = read(text, size)
        assert found_plain == plain, size
        assert [(item.name, item.arguments) for item in found] == calls, size


def test_texts_are_streamed_as_they_come() -> None:
    """Others when they are complete."""
    parser = GemmaToolParser()
    assert parser.push("<|tool_call>call:book{ci") == [CallBegin("book"), Arguments("{", False)]
    assert parser.push('ty:<|"|>San') == [Arguments('"city": "San', is_last=False)]
    assert parser.push(' "Jo<|"') == [Arguments(r" \"Jo", is_last=False)]
    assert parser.push("|>,guests:5") == [Arguments('", "guests": ', is_last=False)]
    assert parser.push("}") == [Arguments("5}", is_last=True)]
    assert parser.push("<tool_call|>") == parser.finish() == []


@pytest.mark.parametrize(
    ("behind", "plain"), [("", ""), ("call:f{", "call:f{"), ("call:f{a:1}", "call:f{a:1}")]
)
def test_json_is_read_as_json_to_its_end(behind: str, plain: str) -> None:
    """A text in it, or what follows it, may look like a call in the other form, and the answer may
    be cut right before it."""
    arguments = '{"a": "call:f{x}", "b": " call:f{"}'
    text = f'<|tool_call>{{"name": "g", "arguments": {arguments}}}{behind}<tool_call|>'
    for size in range(1, len(text) + 1):
        assert read(text, size) == (plain, [ToolCall("g", arguments)])


@pytest.mark.parametrize("piece", ["word ", "<|tool_", "<tool_call|"])
def test_a_word_is_looked_through_once(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the end of what has come, which may begin a mark, however many tokens it has."""
    counts = CountingRe()
    monkeypatch.setattr(gemma_call_reader, "re", counts)
    word = f"w{piece * 200}"
    text = f"<|tool_call>call:f{{a:{word}}}"
    assert read(text, len(piece)) == ("", [ToolCall("f", json.dumps({"a": word.strip()}))])
    assert counts.num_characters < 4 * len(text)
