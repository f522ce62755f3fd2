"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from deployments.parsers.call_reader import Arguments, CallBegin
from deployments.parsers.tool_parser import MakeParser


class Reasoning(NamedTuple):
    """A piece of what the model thought."""

    text: str


class Call(NamedTuple):
    """The beginning of a call; the following arguments belong to it."""

    name: str
    call_id: str


Piece = str | Reasoning | Call | Arguments
"""A piece of text, or of something else; none is empty except the last arguments of a call."""


class AnswerReader:
    """Reads one choice.

    Args:
        tool_parser: reads tool calls; ``None`` leaves the text as it is.
        is_one_call: whether calls after the first are dropped.
    """

    def __init__(self, tool_parser: MakeParser | None, *, is_one_call: bool) -> None:
        self._parser = tool_parser() if tool_parser else None
        self._max_calls = 1 if is_one_call else sys.maxsize
        self._num_calls = 0

    def read(self, text: str, *, reasoning: str | None = None, is_last: bool) -> Iterator[Piece]:
        """Yield what is certain once the next piece of the answer has arrived.

        Args:
            reasoning: what was thought before ``text``.
            is_last: whether nothing follows.
        """
        if reasoning:
            yield Reasoning(reasoning)
        if self._parser is None:
            if text:
                yield text
            return
        parts = [*self._parser.push(text)]
        parts += self._parser.finish() if is_last else []
        for part in parts:
            if isinstance(part, CallBegin):
                self._num_calls += 1
                if self._is_wanted:
                    yield Call(part.name, self._parser.call_id())
            elif isinstance(part, Arguments):
                if self._is_wanted:
                    yield part
            elif part:
                yield part

    @property
    def _is_wanted(self) -> bool:
        return self._num_calls <= self._max_calls
