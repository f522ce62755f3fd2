"""Tool calls in the shape of the OpenAI API."""

from __future__ import annotations

import sys
from typing import Any
from uuid import uuid4

from deployments.tool_parsers import ToolParser, joined


class ToolReader:
    """The text and the tool calls of one choice, in the shape of the OpenAI API."""

    def __init__(self, parser: type[ToolParser] | None, *, is_one_call: bool) -> None:
        self._parser = parser() if parser else None
        self._max_calls = 1 if is_one_call else sys.maxsize
        self._num_calls = 0

    def read(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """What ``text``, the next piece of the answer, makes certain."""
        if self._parser is None:
            return text, []
        parts = self._parser.push(text)
        if is_last:
            parts += self._parser.finish()
        text, calls = joined(parts)
        calls = calls[: self._max_calls - self._num_calls]
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return text, [
            {
                "index": index,
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls, first)
        ]

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason the OpenAI API gives."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason
