"""The parts of an answer, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest

from deployments.parsers.answer_reader import AnswerReader, Piece, Reasoning
from deployments.parsers.harmony_parser import HarmonyParser
from deployments.parsers.tool_parsers import HarmonyToolParser, HermesToolParser

NEXT = "<|end|><|start|>assistant<|channel|>"
CHANNELS = (
    f"<|channel|>analysis<|message|>Hm.{NEXT}analysis<|message|>Well.{NEXT}commentary<|message|>"
    f"\nWait.{NEXT}commentary<|message|>So.{NEXT}commentary to=functions.f<|message|>{{}}<|call|>"
    f"<|start|>assistant<|channel|>analysis<|message|>Now.{NEXT}final<|message|>\nDone."
)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def cut(written: str, size: int) -> Iterator[str]:
    """Pieces of ``size`` characters."""
    return (written[start : start + size] for start in range(0, len(written), size))


def whole(pieces: list[Piece]) -> list[Reasoning | str]:
    """Runs of pieces of a kind as one; instead of a call its name and its arguments in brackets."""
    found: list[Reasoning | str] = []
    for kind, run in groupby(pieces, key=type):
        text = "".join(piece if isinstance(piece, str) else piece[0] for piece in run)
        found.append(Reasoning(text) if kind is Reasoning else text if kind is str else f"[{text}]")
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_line_break_separates_what_is_joined(is_joined: bool, size: int) -> None:
    """Texts, and thoughts, that something else lies between have none if they are apart; what the
    model wrote itself is kept."""
    parser = HarmonyParser(is_open=False)
    reader = AnswerReader(HarmonyToolParser, is_one_call=False, is_joined=is_joined)
    found: list[Piece] = []
    for text in cut(CHANNELS, size):
        reasoning, said = parser.push(text)
        found += reader.read(said, reasoning=reasoning, is_last=False)
    reasoning, said = parser.finish()
    found += reader.read(said, reasoning=reasoning, is_last=True)
    line = "\n" if is_joined else ""
    assert whole(found) == [
        Reasoning("Hm.\nWell."),
        "\nWait.\nSo.",
        *("[f]", "[{}]"),
        Reasoning(f"{line}Now."),
        f"{line}\nDone.",
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("before", "between", "behind"),
    [("a", "\nb", ["b"]), ("a", "\n\nb", ["\nb"]), ("a", "\n", []), ("", "\nb", ["\nb"])],
)
def test_one_line_break_lies_between_two_texts(
    before: str, between: str, behind: list[str], size: int
) -> None:
    """However they are cut; the first text has what it has."""
    reader = AnswerReader(HermesToolParser, is_one_call=False, is_joined=False)
    found = [
        piece
        for text in cut(f"{before}{CALL}{between}", size)
        for piece in reader.read(text, is_last=False)
    ]
    found += reader.read("", is_last=True)
    assert whole(found) == [*filter(None, [before]), "[f]", "[{}]", *behind]
