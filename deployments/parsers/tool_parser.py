"""What reads the tool calls in what a model writes, and makes the grammar of those it must."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

from deployments.parsers.call_reader import Arguments, CallBegin, CallPart


class Function(NamedTuple):
    """A function that can be called; ``parameters`` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    """A call; ``arguments`` is a JSON text."""

    name: str
    arguments: str


Part = str | CallPart

MakeParser = Callable[[], "ToolParser"]
"""Makes the parser of one answer."""


class ToolParser(ABC):
    """Splits the text of one answer, as it comes, into plain text and calls.

    A call is given out from where it is certain to be one; what turns out to be none is plain text.

    Args:
        functions: those that may be called.
    """

    arguments_key: ClassVar[str] = "arguments"
    """The key of the arguments in a required call."""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        self._functions = functions

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Return what is certain now that ``text`` has come."""

    @abstractmethod
    def finish(self) -> list[Part]:
        """Return the rest: the answer has ended."""

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Function], *, is_one: bool) -> str:
        """Return the grammar of answers that are calls of ``functions`` and nothing else.

        Args:
            is_one: whether there is exactly one call.
        """

    @classmethod
    def call_id(cls) -> str:
        """Return a new id, as the templates of these models take it."""
        return f"call_{uuid4().hex[:24]}"


def num_held(text: str, tag: str) -> int:
    """Return the length of the end of ``text`` that may belong to ``tag``, white space before it
    included."""
    return len(text) - len(without_part(text, tag).rstrip())


def without_part(text: str, *marks: str) -> str:
    """Return ``text`` without what may be the beginning of one of ``marks`` at its end."""
    for number in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-number:]) for mark in marks):
            return text[:-number]
    return text


def joined(parts: Iterable[Part]) -> tuple[str, list[ToolCall]]:
    """Return the text of an answer, and its calls."""
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
