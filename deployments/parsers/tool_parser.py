"""The interface of parsers of tool calls, which also make the grammar of required calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

from deployments.parsers.call_reader import CallPart


class Function(NamedTuple):
    """A function that can be called; ``parameters`` is a JSON schema."""

    name: str
    parameters: Mapping[str, Any]


Part = str | CallPart

MakeParser = Callable[[], "ToolParser"]
"""Makes the parser of one answer."""


class ToolParser(ABC):
    """Splits the text of one answer, as it arrives, into plain text and calls.

    A call is passed on once it is certain to be one; what turns out not to be a call is plain text.

    Args:
        functions: those that may be called.
    """

    arguments_key: ClassVar[str] = "arguments"
    """The key of the arguments in a required call."""

    @abstractmethod
    def __init__(self, functions: Sequence[Function] = ()) -> None:
        """Begin with an answer."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Return what is certain now that ``text`` has arrived."""

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
        """Return a new id, in the form the templates of these models accept."""
        return f"call_{uuid4().hex[:24]}"
