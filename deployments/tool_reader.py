"""Tool calls in the shape of the OpenAI API."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from uuid import uuid4

from deployments.call_reader import Arguments, CallBegin
from deployments.tool_parsers import ToolParser


class ToolDelta(NamedTuple):
    """What a piece of an answer made certain.

    Attributes:
        begun: the calls that began, without arguments.
        arguments: the next piece of each call's arguments.
    """

    text: str
    begun: list[dict[str, Any]]
    arguments: list[dict[str, Any]]


class ToolReader:
    """The text and the tool calls of one choice, in the shape of the OpenAI API.

    Args:
        is_one_call: whether calls after the first are dropped.
        is_named: whether the request named the function to call.
    """

    def __init__(
        self, parser: type[ToolParser] | None, *, is_one_call: bool = False, is_named: bool = False
    ) -> None:
        self._parser = parser() if parser else None
        self._is_named = is_named
        self._max_calls = 1 if is_one_call else sys.maxsize
        self._num_begun = 0
        self._is_inside = False

    def read(self, text: str, *, is_last: bool) -> ToolDelta:
        """What ``text``, the next piece of the answer, makes certain."""
        if self._parser is None:
            return ToolDelta(text, [], [])
        parts = self._parser.push(text)
        if is_last:
            parts += self._parser.finish()
        shown: list[str] = []
        begun: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        for part in parts:
            if isinstance(part, str):
                shown.append(part)
            elif isinstance(part, CallBegin):
                self._num_begun += 1
                begun += self._begin(part) if self._is_wanted else []
            elif self._is_wanted:
                self._add(part, arguments)
        pieces = [
            {"index": index, "function": {"arguments": piece}} for index, piece in arguments.items()
        ]
        return ToolDelta("".join(shown), begun, pieces)

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text and the calls of a whole answer."""
        text, begun, pieces = self.read(text, is_last=True)
        arguments = {piece["index"]: piece["function"]["arguments"] for piece in pieces}
        return text, [
            {
                "id": call["id"],
                "type": call["type"],
                "function": call["function"] | {"arguments": arguments.get(call["index"], "")},
            }
            for call in begun
        ]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason the OpenAI API gives, which is ``stop`` where the client chose the function,
        not the model; a call that a stop string cut short is none to make."""
        has_called = self._num_begun > 0 and not self._is_inside
        is_choice = has_called and not self._is_named
        return "tool_calls" if reason == "stop" and is_choice else reason

    @property
    def _is_wanted(self) -> bool:
        return self._num_begun <= self._max_calls

    def _begin(self, call: CallBegin) -> list[dict[str, Any]]:
        self._is_inside = True
        return [
            {
                "index": self._num_begun - 1,
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": ""},
            }
        ]

    def _add(self, piece: Arguments, arguments: dict[int, str]) -> None:
        index = self._num_begun - 1
        arguments[index] = arguments.get(index, "") + piece.text
        self._is_inside = not piece.is_last
