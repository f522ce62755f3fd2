"""Tool calls in the shape of the OpenAI API."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from deployments.parsers.call_reader import Arguments, CallBegin
from deployments.parsers.tool_parser import MakeParser


class ToolDelta(NamedTuple):
    """What a piece of an answer made certain.

    Attributes:
        calls: in the order of the answer, a call that begins, without arguments, or the next piece
            of the arguments of the one that began last.
    """

    text: str
    calls: list[dict[str, Any]]


class ToolReader:
    """Reads the text and the tool calls of one choice, in the shape of the OpenAI API.

    Args:
        is_one_call: whether calls after the first are dropped.
        is_named: whether the request named the function to call.
    """

    def __init__(
        self, parser: MakeParser | None, *, is_one_call: bool = False, is_named: bool = False
    ) -> None:
        self._parser = parser() if parser else None
        self._is_named = is_named
        self._max_calls = 1 if is_one_call else sys.maxsize
        self._num_begun = 0
        self._is_inside = False

    def read(self, text: str, *, is_last: bool) -> ToolDelta:
        """Return what ``text``, the next piece of the answer, makes certain."""
        if self._parser is None:
            return ToolDelta(text, [])
        parts = self._parser.push(text)
        if is_last:
            parts += self._parser.finish()
        shown: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                shown.append(part)
            elif isinstance(part, CallBegin):
                self._num_begun += 1
                calls += [self._begin(part, self._parser.call_id())] if self._is_wanted else []
            elif self._is_wanted:
                calls.append(self._go_on(part))
        return ToolDelta("".join(shown), calls)

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text and the calls of a whole answer."""
        text, pieces = self.read(text, is_last=True)
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if "id" in piece:
                calls.append({key: piece[key] for key in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        return text, calls

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the reason the OpenAI API gives, which is ``stop`` where the client chose the
        function, not the model; a call that a stop string cut short is none to make."""
        has_called = self._num_begun > 0 and not self._is_inside
        is_choice = has_called and not self._is_named
        return "tool_calls" if reason == "stop" and is_choice else reason

    @property
    def _is_wanted(self) -> bool:
        return self._num_begun <= self._max_calls

    def _begin(self, call: CallBegin, call_id: str) -> dict[str, Any]:
        self._is_inside = True
        return {
            "index": self._num_begun - 1,
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }

    def _go_on(self, piece: Arguments) -> dict[str, Any]:
        self._is_inside = not piece.is_last
        return {"index": self._num_begun - 1, "function": {"arguments": piece.text}}
