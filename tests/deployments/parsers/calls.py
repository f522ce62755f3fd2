"""What a tool parser gives out, put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deployments.parsers.call_reader import Arguments, CallBegin
from deployments.parsers.tool_parser import Part


class ToolCall(NamedTuple):
    """A call; ``arguments`` is a JSON text."""

    name: str
    arguments: str


def joined(parts: Iterable[Part]) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its calls."""
    text, calls = "", list[ToolCall]()
    for part in parts:
        match part:
            case str():
                text += part
            case CallBegin(name):
                calls.append(ToolCall(name, ""))
            case Arguments(piece):
                calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + piece)
    return text, calls
