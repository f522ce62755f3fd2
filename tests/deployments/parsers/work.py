"""What reading an answer takes, counted: times would be those of the machine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, SupportsIndex


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """The calls of functions by their names, those in C included."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[function.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


class CountingRe:
    """In place of the module ``re``: makes patterns that count what they are to look through.

    Attributes:
        num_characters: of all texts, from where it is looked at.
    """

    escape, DOTALL = staticmethod(re.escape), re.DOTALL

    def __init__(self) -> None:
        self.num_characters = 0

    def compile(self, pattern: str) -> CountingPattern:
        """In place of ``re.compile``."""
        return CountingPattern(re.compile(pattern), self)


class CountingPattern:
    """In place of a pattern."""

    def __init__(self, pattern: re.Pattern[str], counts: CountingRe) -> None:
        self._pattern = pattern
        self._counts = counts

    def match(self, text: str, position: int = 0) -> re.Match[str] | None:
        self._counts.num_characters += len(text) - position
        return self._pattern.match(text, position)

    def search(self, text: str, position: int = 0) -> re.Match[str] | None:
        self._counts.num_characters += len(text) - position
        return self._pattern.search(text, position)


class CountedText(str):
    """A text that counts the characters that are copied out of it or looked through by its methods,
    and by those of texts made from it.

    Attributes:
        counts: ``characters``, shared with those texts.
    """

    counts: Counter[str]

    def __new__(cls, text: str, counts: Counter[str] | None = None) -> CountedText:
        made = super().__new__(cls, text)
        made.counts = Counter() if counts is None else counts
        return made

    def __getitem__(self, key: SupportsIndex | slice) -> CountedText:
        return self._copy(super().__getitem__(key))

    def strip(self, chars: str | None = None, /) -> CountedText:
        return self._copy(super().strip(chars))

    def lstrip(self, chars: str | None = None, /) -> CountedText:
        return self._copy(super().lstrip(chars))

    def __add__(self, other: str) -> CountedText:
        return CountedText(super().__add__(other), self.counts)

    def find(
        self, part: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /
    ) -> int:
        self.counts["characters"] += len(self) - int(start or 0)
        return super().find(part, start, end)

    def __contains__(self, part: object) -> bool:
        self.counts["characters"] += len(self)
        return isinstance(part, str) and super().__contains__(part)

    def _copy(self, text: str) -> CountedText:
        self.counts["characters"] += len(text)
        return CountedText(text, self.counts)
