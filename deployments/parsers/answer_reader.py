"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
        is_joined: whether all texts become one, and all thoughts; otherwise a line break that would
            separate a text from that before something else is left out, and so with thoughts.
        on_dropped: is told the arguments of calls that are dropped.
    """

    def __init__(
        self,
        tool_parser: MakeParser | None,
        *,
        is_one_call: bool,
        is_joined: bool,
        on_dropped: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._parser = tool_parser() if tool_parser else None
        self._max_calls = 1 if is_one_call else sys.maxsize
        self._num_calls = 0
        self._is_joined = is_joined
        self._on_dropped = on_dropped
        self._begun: set[type[Piece]] = set()
        self._last: type[Piece] | None = None

    def read(self, text: str, *, reasoning: str | None = None, is_last: bool) -> Iterator[Piece]:
        """Yield what is certain once the next piece of the answer has arrived.

        Args:
            reasoning: what was thought before ``text``.
            is_last: whether nothing follows.
        """
        pieces = self._pieces(text, reasoning, is_last=is_last)
        yield from pieces if self._is_joined else filter(None, map(self._apart, pieces))

    def _pieces(self, text: str, reasoning: str | None, *, is_last: bool) -> Iterator[Piece]:
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
                else:
                    self._on_dropped(part.text)
            elif part:
                yield part

    def _apart(self, piece: Piece) -> Piece | None:
        """Return a piece without the line break before it, if it follows something else and is not
        the first of its kind; nothing if that was all."""
        kind = type(piece)
        is_next = kind is not self._last and kind in self._begun
        self._last = kind
        self._begun.add(kind)
        if is_next and isinstance(piece, str):
            return piece.removeprefix("\n") or None
        if is_next and isinstance(piece, Reasoning):
            rest = piece.text.removeprefix("\n")
            return Reasoning(rest) if rest else None
        return piece

    @property
    def _is_wanted(self) -> bool:
        return self._num_calls <= self._max_calls
