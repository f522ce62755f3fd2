"""The channels of gpt-oss are told apart, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.parsers.harmony_parser import HarmonyParser
from deployments.parsers.reasoning_parser import Split
from deployments.parsers.tool_parsers import HarmonyToolParser
from tests.deployments.parsers.calls import ToolCall, joined

ANALYSIS = "<|channel|>analysis<|message|>Two and two.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Four."
CALL = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
CASES: list[tuple[bool, str, str, str]] = [
    (False, f"{ANALYSIS}{FINAL}", "Two and two.", "Four."),
    (False, f"{ANALYSIS}{FINAL}<|return|>", "Two and two.", "Four."),
    (True, f" Hm.<|end|>{FINAL}", " Hm.", "Four."),
    (False, "<|channel|>final<|message|>1 < 2 <|en", "", "1 < 2 <|en"),
    (False, "<|channel|>analysis<|message|>Two", "Two", ""),
    (False, f"{ANALYSIS}<|start|>assistant<|channel|>analysis<|message|>a", "Two and two.\na", ""),
    (False, f"{ANALYSIS}<|channel|>final<|message|>a", "Two and two.", "a"),
    (
        False,
        f"<|channel|>commentary<|message|>Let me see.<|end|>{ANALYSIS}{FINAL}",
        "Two and two.",
        "Let me see.\nFour.",
    ),
    # A header that is cut off is nothing, and what is no header is text.
    (False, f"{ANALYSIS}<|start|>assistant<|channel|>fin", "Two and two.", ""),
    (False, "<|chan", "", "<|chan"),
    (False, "Four.", "", "Four."),
    (False, '{"a": 1}', "", '{"a": 1}'),
    (False, "", "", ""),
    (False, f"<|channel|>{'x' * 300}", "", "x" * 300),
    # Calls, of which there are two ways to write.
    (False, f"{ANALYSIS}<|start|>assistant{CALL}", "Two and two.", CALL),
    (
        False,
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        "<|message|>{}",
        "Two and two.",
        CALL.removesuffix("<|call|>"),
    ),
    (
        False,
        f"{ANALYSIS}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}"
        "<|end|>",
        "Two and two.",
        CALL,
    ),
    (False, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", CALL),
    (False, "<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", ""),
]


def read(is_open: bool, pieces: list[str]) -> tuple[str, str]:
    parser = HarmonyParser(is_open=is_open)
    found: list[Split] = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.reasoning for part in found), "".join(part.text for part in found)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "said"), CASES)
def test_channels_are_read(is_open: bool, text: str, reasoning: str, said: str) -> None:
    """In one piece, in pieces of three, and letter by letter."""
    for size in (1, 3, 1000):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(is_open, pieces) == (reasoning, said)


TEXTS = st.lists(
    st.sampled_from(
        [
            *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
            *(
                "assistant",
                "analysis",
                "final",
                " to=functions.f",
                "<",
                "<|",
                "{}",
                "a",
                " ",
                "é",
                "x" * 250,
            ),
        ]
    ),
    max_size=14,
).map("".join)


@given(is_open=st.booleans(), text=TEXTS, size=st.integers(1, 12))
def test_cuts_change_nothing(is_open: bool, text: str, size: int) -> None:
    """A stream gives what the whole answer gives."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(is_open, pieces) == read(is_open, [text])


def test_tokens_of_reasoning() -> None:
    """It is over with the mark behind it, and may come again."""
    parser = HarmonyParser(is_open=False)
    assert not parser.is_over
    parser.push("<|channel|>analysis<|message|>a")
    assert (parser.is_over, parser.has_reasoned) == (False, True)
    parser.push("<|end|>")
    assert parser.is_over
    parser.push("<|start|>assistant<|channel|>analysis<|message|>")
    assert not parser.is_over


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_reach_their_parser(size: int) -> None:
    """Without what was thought before them."""
    text = (
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
    )
    reasoning = HarmonyParser(is_open=False)
    calls = HarmonyToolParser()
    parts = []
    for start in range(0, len(text), size):
        parts += calls.push(reasoning.push(text[start : start + size]).text)
    parts += [*calls.push(reasoning.finish().text), *calls.finish()]
    assert joined(parts) == ("Wait.", [ToolCall("f", '{"a":1}')])
