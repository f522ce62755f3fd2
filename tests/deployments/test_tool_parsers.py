"""Tool calls are read out of what a model writes, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tool_parsers import (
    TOOL_PARSERS,
    Function,
    HermesToolParser,
    Llama3JsonToolParser,
    ToolCall,
    ToolParser,
    joined,
)
from hdserve.engine.grammar import Grammars
from hdserve.engine.tokenizer import load_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</b>", "n": [1]}}\n</tool_call>'
READ = ToolCall("f", '{"a": "</b>", "n": [1]}')

HERMES: list[tuple[str, str, list[ToolCall]]] = [
    ("plain text < 5, <tool", "plain text < 5, <tool", []),
    (CALL, "", [READ]),
    (f"Let me look.\n\n{CALL}\n{CALL}\n", "Let me look.", [READ, READ]),
    (CALL.removesuffix("\n</tool_call>"), "", [READ]),
    ("<tool_call>{broken</tool_call> on", "<tool_call>{broken</tool_call> on", []),
    ("<tool_call>{broken", "<tool_call>{broken", []),
    ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("spaces  \n kept ", "spaces  \n kept ", []),
]
LLAMA: list[tuple[str, str, list[ToolCall]]] = [
    ("plain text", "plain text", []),
    ('{"name": "f", "parameters": {"a": 1}}', "", [ToolCall("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [ToolCall("f", "{}")]),
    (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        [ToolCall("f", "{}"), ToolCall("g", "{}")],
    ),
    ('{"no": "call"}', '{"no": "call"}', []),
    ("  text { here", "  text { here", []),
]
CASES = [
    *((HermesToolParser, *case) for case in HERMES),
    *((Llama3JsonToolParser, *case) for case in LLAMA),
]


def read(parser: type[ToolParser], pieces: list[str]) -> tuple[str, list[ToolCall]]:
    made = parser()
    parts: list[str | ToolCall] = []
    for piece in pieces:
        parts += made.push(piece)
    return joined([*parts, *made.finish()])


@pytest.mark.parametrize(("parser", "text", "plain", "calls"), CASES)
def test_calls_are_read(
    parser: type[ToolParser], text: str, plain: str, calls: list[ToolCall]
) -> None:
    """Text and calls are told apart; what is no call after all is text, unchanged."""
    assert read(parser, [text]) == (plain, calls)
    assert read(parser, list(text)) == (plain, calls)


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_cuts_change_nothing(case: Any, cuts: list[int]) -> None:
    """A stream gives what the whole answer gives, wherever it is cut."""
    parser, text, plain, calls = case
    ends = [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    starts = [0, *ends[:-1]]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    assert read(parser, pieces) == (plain, calls)


@given(st.text(alphabet='<tol_cal>{}/\n x"', max_size=60))
def test_text_without_calls_survives(text: str) -> None:
    """Nothing that is no call is lost."""
    for parser in (HermesToolParser, Llama3JsonToolParser):
        plain, calls = read(parser, list(text))
        assert not calls
        assert "".join(plain.split()) == "".join(text.split())


def test_text_is_streamed_as_it_comes() -> None:
    """Only what may belong to a call is held back."""
    parser = HermesToolParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" ") == []
    assert parser.push("there <too") == [" there"]
    assert parser.push("t") == [" <toot"]


FUNCTIONS = [
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "$defs": {"city": {"enum": ["Seoul"]}},
        },
    ),
    Function("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("parser", TOOL_PARSERS.values())
def test_grammars_and_parsers_agree(parser: type[ToolParser], is_one: bool) -> None:
    """What a grammar allows, its parser reads; other functions, arguments and text it forbids."""
    tokenizer = load_tokenizer("hdserve-mini")
    grammars = Grammars(tokenizer, tokenizer.vocab_size, {2})
    text = parser.grammar(FUNCTIONS, is_one=is_one)

    def allows(answer: str) -> bool:
        state = grammars.state(text)
        for token_id in [*tokenizer.encode(answer), 2]:
            if state.is_complete and token_id != 2:
                return False
            state.push(token_id)
        return state.error is None

    def written(name: str, arguments: dict[str, Any]) -> str:
        call = json.dumps({"name": name, parser.arguments_key: arguments})
        is_hermes = parser is HermesToolParser
        return f"<tool_call>\n{call}\n</tool_call>" if is_hermes else call

    weather, now = written("get_weather", {"city": "Seoul"}), written("now", {})
    both = f"{weather}\n{now}" if parser is HermesToolParser else f"{weather}; {now}"
    assert allows(weather)
    assert allows(now)
    assert allows(both) is not is_one
    assert [call.name for call in read(parser, [both])[1]] == ["get_weather", "now"]
    for wrong in (written("then", {}), written("now", {"a": 1}), f"So: {now}"):
        assert not allows(wrong)
