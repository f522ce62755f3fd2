"""The interface of parsers that separate reasoning from text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class Split(NamedTuple):
    """A piece of an answer, separated into reasoning and text."""

    reasoning: str
    text: str


class ReasoningParser(ABC):
    """Reads the marks a model writes; text arrives in pieces of any size, and is passed on once it
    certainly belongs to no mark.

    Args:
        is_open: whether the prompt ends with the opening mark, so that the answer need not have it.
        has_tools: whether something reads calls in the text.

    Attributes:
        has_reasoned: whether there was an opening mark.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str]

    def __init__(self, *, is_open: bool, has_tools: bool = True) -> None:
        self._is_open = is_open
        self._has_tools = has_tools
        self.has_reasoned = False

    @classmethod
    @abstractmethod
    def grammar(cls, answer: str, *, is_open: bool) -> str:
        """Return the grammar of reasoning and, behind it, an answer of another grammar.

        Args:
            answer: the other grammar (:mod:`hdserve.grammar`).
            is_open: as of a parser; without it there may be the answer alone.
        """

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether what follows is not reasoning, as far as is known."""

    @abstractmethod
    def push(self, text: str) -> Split:
        """Return what is certain now that ``text`` has arrived."""

    @abstractmethod
    def finish(self) -> Split:
        """Return the rest: the answer has ended."""
