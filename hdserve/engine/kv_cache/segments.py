"""Which rows of the KV cache belong to whom: segments of rows, and those that are free."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ROW_ALIGNMENT = 32
"""Segments begin and end at multiples of this."""


def align(number: int, alignment: int = ROW_ALIGNMENT) -> int:
    """``number`` rounded up to a multiple of ``alignment``."""
    return -(-number // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of the cache that belong to one sequence; column ``c`` is row
    ``start + c``."""

    start: int
    num_rows: int

    @property
    def end(self) -> int:
        return self.start + self.num_rows


class Owned(NamedTuple):
    """A segment with ``num_used`` columns in use, counted from the first, that is to have
    ``num_rows`` rows: aligned, and no fewer than now."""

    segment: Segment
    num_used: int
    num_rows: int


class RowAllocator:
    """Gives rows away in segments, and takes them back.

    Args:
        num_rows: aligned.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._gaps = [Segment(0, num_rows)]

    @property
    def num_free(self) -> int:
        return sum(segment.num_rows for segment in self._gaps)

    @property
    def gaps(self) -> tuple[Segment, ...]:
        """The rows that are free, in order."""
        return tuple(self._gaps)

    def gap_at(self, start: int) -> Segment | None:
        """The gap that begins at row ``start``, if one does."""
        index = bisect_left(self._gaps, start, key=lambda gap: gap.start)
        gap = self._gaps[index] if index < len(self._gaps) else None
        return gap if gap is not None and gap.start == start else None

    def allocate(self, num_rows: int) -> Segment | None:
        """Take the first gap of at least ``num_rows`` rows; ``None`` if there is none now."""
        wanted = align(num_rows)
        for index, gap in enumerate(self._gaps):
            if gap.num_rows >= wanted:
                rest = Segment(gap.start + wanted, gap.num_rows - wanted)
                self._gaps[index : index + 1] = [rest] if rest.num_rows else []
                return Segment(gap.start, wanted)
        return None

    def allocate_at(self, start: int, num_rows: int) -> Segment | None:
        """Take the rows from ``start``, which must be free; ``None`` if a later one is taken."""
        wanted = Segment(start, align(num_rows))
        for index, gap in enumerate(self._gaps):
            if gap.start <= start and wanted.end <= gap.end:
                rests = (
                    Segment(gap.start, start - gap.start),
                    Segment(wanted.end, gap.end - wanted.end),
                )
                self._gaps[index : index + 1] = [rest for rest in rests if rest.num_rows]
                return wanted
        return None

    def free(self, segment: Segment) -> None:
        """Give the rows back; adjacent gaps become one."""
        index = bisect(self._gaps, segment.start, key=lambda gap: gap.start)
        around = slice(max(0, index - 1), index + 1)
        self._gaps[around] = _merge([*self._gaps[around], segment])

    def shorten(self, segment: Segment, num_rows: int) -> Segment:
        """Give back all but the first ``num_rows`` rows of ``segment``, which has at least as
        many.

        Returns:
            The rows that are left.
        """
        kept = Segment(segment.start, align(num_rows))
        if kept.num_rows < segment.num_rows:
            self.free(Segment(kept.end, segment.num_rows - kept.num_rows))
        return kept

    def free_all(self) -> None:
        """Give all rows back, whoever owns them."""
        self._gaps = [Segment(0, self.num_rows)]

    def join(self, start: int, end: int, gap: Segment) -> None:
        """Make ``gap`` all that is free between rows ``start`` and ``end``, once the segments there
        have moved."""
        self._gaps = [each for each in self._gaps if each.end <= start or end <= each.start]
        if gap.num_rows:
            self.free(gap)


def _merge(gaps: Iterable[Segment]) -> list[Segment]:
    """``gaps`` in order, adjacent ones merged."""
    merged: list[Segment] = []
    for gap in sorted(gaps, key=lambda gap: gap.start):
        if not merged or merged[-1].end < gap.start:
            merged.append(gap)
            continue
        last = merged[-1]
        assert last.end == gap.start, "a segment was freed twice"
        merged[-1] = Segment(last.start, last.num_rows + gap.num_rows)
    return merged
