"""What tells what a model thinks from what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class Split(NamedTuple):
    """A piece of an answer, told apart."""

    reasoning: str
    text: str


class ReasoningParser(ABC):
    """Reads the marks a model writes; text comes in any pieces, and is given out where it is
    certain to belong to no mark.

    Args:
        is_open: whether the prompt ends in the opening mark, which the answer then need not have.

    Attributes:
        has_reasoned: whether there was an opening mark.
    """

    OPEN: ClassVar[str]
    CLOSE: ClassVar[str]

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self.has_reasoned = False

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether what follows is no reasoning, as far as is known."""

    @abstractmethod
    def push(self, text: str) -> Split:
        """Return what is certain now that ``text`` has come."""

    @abstractmethod
    def finish(self) -> Split:
        """Return the rest: the answer has ended."""
