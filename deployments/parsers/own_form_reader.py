"""Reading tool calls in a model's own format, giving their arguments as JSON."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from deployments.parsers.call_reader import Arguments, CallBegin, CallPart, CallReader

_HEAD_ENDS = ("{", ">")
"""A head has none of them before its end, where it has one or is followed by what has one."""


class OpenArguments(ABC):
    """The arguments of a call that has begun.

    Attributes:
        are_complete: whether they have ended.
        is_over: whether nothing that follows belongs to them, as after ``closing``.
    """

    def __init__(self) -> None:
        self.are_complete = False
        self.is_over = False

    def read(self, text: str) -> tuple[str, str]:
        """Return the next piece of the arguments, as JSON text, and the rest of ``text``."""
        found = ""
        while text and not self.is_over:
            piece, rest = self._next(text)
            found += piece
            if not piece and rest == text:
                break
            text = rest
        return found, text

    @abstractmethod
    def _next(self, text: str) -> tuple[str, str]:
        """Return what is certain at the beginning of ``text``, and the rest of it."""


class OwnFormReader(CallReader):
    """Reads calls of another format, or, if the first is none, those of :class:`CallReader`.

    Args:
        opening: what comes before the arguments; its one group is the name.
        begin: makes the reader of a call's arguments; is given the name of the function.
        is_bare: whether there is one call, without an opening mark and perhaps without ``closing``.
    """

    def __init__(
        self,
        closing: str,
        opening: re.Pattern[str],
        begin: Callable[[str], OpenArguments],
        *,
        is_bare: bool = False,
    ) -> None:
        super().__init__(closing)
        self._opening = opening
        self._begin = begin
        self._is_bare = is_bare
        self._arguments: OpenArguments | None = None
        self._is_other = False

    def end(self) -> list[CallPart]:
        if self._arguments is None:
            return super().end()
        self.kept = ""
        return []

    def _take(self) -> Iterator[CallPart]:
        while not self.is_closed:
            if self._arguments is not None:
                text, self.kept = self._arguments.read(self.kept)
                if text:
                    yield Arguments(text, self._arguments.are_complete)
                if not self._arguments.is_over:
                    return
                self._arguments = None
            elif self._is_bare and self.num_calls:
                self._close_bare()
                return
            elif head := self._begun_own():
                self.kept = self.kept[head.end() :]
                self.num_calls += 1
                self._arguments = self._begin(head[1])
                yield CallBegin(head[1])
            else:
                yield from super()._take()
                return

    def _begun_own(self) -> re.Match[str] | None:
        """Return the opening that the buffer begins with, if it may have become complete."""
        if self._is_other or not any(end in self._new for end in _HEAD_ENDS):
            return None
        head = self._opening.match(self.kept)
        self._is_other = head is None and any(end in self.kept for end in _HEAD_ENDS)
        return head

    def _close_bare(self) -> None:
        """Stop if what follows the call is ``closing``, or cannot become it."""
        left = self.kept.lstrip()
        if left.startswith(self.closing):
            self.is_closed, self.kept, self.rest = True, "", left.removeprefix(self.closing)
        elif not self.closing.startswith(left):
            self.is_closed, self.kept, self.rest = True, "", self.kept
