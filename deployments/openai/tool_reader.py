"""Tool calls in the shape of the OpenAI API."""

from __future__ import annotations

from typing import Any

from deployments.parsers.answer_reader import AnswerReader, Call
from deployments.parsers.call_reader import Arguments
from deployments.parsers.tool_parser import MakeParser


class ToolReader:
    """Reads the text and the tool calls of one choice, in the shape of the OpenAI API.

    Args:
        is_one_call: whether calls after the first are dropped.
        is_named: whether the request named the function to call.
    """

    def __init__(self, parser: MakeParser | None, *, is_one_call: bool, is_named: bool) -> None:
        self._reader = AnswerReader(parser, is_one_call=is_one_call, is_joined=True)
        self._is_named = is_named
        self._num_begun = 0
        self._is_inside = False

    def read(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return what ``text``, the next piece of the answer, makes certain: text, and, in the
        order of the answer, calls that begin, without arguments, or the next piece of the arguments
        of the one that began last."""
        shown: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in self._reader.read(text, is_last=is_last):
            if isinstance(piece, str):
                shown.append(piece)
            elif isinstance(piece, Call):
                calls.append(self._begin(piece))
            elif isinstance(piece, Arguments):
                calls.append(self._go_on(piece))
        return "".join(shown), calls

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

    def _begin(self, call: Call) -> dict[str, Any]:
        self._num_begun += 1
        self._is_inside = True
        return {
            "index": self._num_begun - 1,
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }

    def _go_on(self, piece: Arguments) -> dict[str, Any]:
        self._is_inside = not piece.is_last
        return {"index": self._num_begun - 1, "function": {"arguments": piece.text}}
