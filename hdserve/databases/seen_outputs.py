"""Which outputs have been seen: a set of (origin, sequence number), stored as few intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hdserve.databases.segment import Segment
from hdserve.errors import SnapshotError

OriginRanges = dict[str, list[tuple[int, int]]]
"""For each origin the half-open intervals of sequence numbers, in ascending order."""

MAX_ORIGINS = 4096
"""The most origins that one namespace remembers.  Beyond it the origin seen longest ago is
forgotten: most likely a replica that is gone."""

MAX_TOTAL_ORIGINS = 2**14
"""About the most origins that all namespaces of a log remember; each takes a kilobyte."""

MIN_ORIGINS = 64
"""The origins that a namespace may always remember, however many namespaces there are."""

MAX_INTERVALS = 1024
"""The most intervals of one origin.  Beyond it the two lowest are joined, and the gap between them
counts as seen."""


class SequenceRanges:
    """A growing set of integers, stored as sorted, disjoint, half-open intervals.

    An origin numbers its outputs without gaps, so there is nearly always one interval; gaps are
    outputs that a lost actor never passed on.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in intervals:
            self.add(start, stop)

    def has_all(self, start: int, stop: int) -> bool:
        """Whether every ``start <= number < stop`` is in it."""
        index = bisect_right(self._starts, start) - 1
        return start >= stop or (index >= 0 and stop <= self._stops[index])

    def intervals(self) -> list[tuple[int, int]]:
        """``(start, stop)`` in ascending order."""
        return list(zip(self._starts, self._stops, strict=True))

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Add ``start <= number < stop`` and return the intervals of it that were missing."""
        if start >= stop:
            return []
        if not self._stops or start > self._stops[-1]:
            self._starts.append(start)
            self._stops.append(stop)
            self._join_lowest()
            return [(start, stop)]
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        missing = self._gaps(low, high, start, stop)
        merged_start = min([start, *self._starts[low : low + 1]]) if low < high else start
        merged_stop = max([stop, *self._stops[high - 1 : high]]) if low < high else stop
        self._starts[low:high] = [merged_start]
        self._stops[low:high] = [merged_stop]
        self._join_lowest()
        return missing

    def _gaps(self, low: int, high: int, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of ``start..stop`` outside the intervals ``low..high``."""
        gaps = []
        position = start
        for index in range(low, high):
            if position < self._starts[index]:
                gaps.append((position, min(self._starts[index], stop)))
            position = max(position, self._stops[index])
        if position < stop:
            gaps.append((position, stop))
        return gaps

    def _join_lowest(self) -> None:
        if len(self._starts) > MAX_INTERVALS:
            del self._starts[1], self._stops[0]


class OriginLimit:
    """How many origins the namespaces of a log may remember.

    Attributes:
        num_known: by all of them together.
    """

    def __init__(self) -> None:
        self.num_known = 0
        self._share = MAX_ORIGINS

    def share(self, num_namespaces: int) -> None:
        """Divide the origins among the current number of namespaces."""
        share = MAX_TOTAL_ORIGINS // max(num_namespaces, 1)
        self._share = min(MAX_ORIGINS, max(MIN_ORIGINS, share))

    def is_reached(self, num_origins: int) -> bool:
        """Whether a namespace with ``num_origins`` must forget one to add another: it may exceed
        its share only while others use less of theirs."""
        is_full = self.num_known >= MAX_TOTAL_ORIGINS
        return num_origins >= (self._share if is_full else MAX_ORIGINS)


class SeenOutputs:
    """A growing set of output names; it makes merging segments a union of sets."""

    __slots__ = ("_limit", "_origins")

    def __init__(
        self,
        ranges: Mapping[str, Iterable[tuple[int, int]]] | None = None,
        limit: OriginLimit | None = None,
    ) -> None:
        self._limit = limit or OriginLimit()
        self._origins = {
            origin: SequenceRanges(intervals) for origin, intervals in (ranges or {}).items()
        }
        self._limit.num_known += len(self._origins)

    def clear(self) -> None:
        """Forget everything."""
        self._limit.num_known -= len(self._origins)
        self._origins.clear()

    def ranges(self) -> OriginRanges:
        """The sequence numbers that were seen of each origin."""
        return {origin: ranges.intervals() for origin, ranges in self._origins.items()}

    def numbers(self, origin: str) -> SequenceRanges:
        """The sequence numbers of the outputs of ``origin`` that were seen."""
        return self._origins.get(origin, SequenceRanges())

    def add(self, segment: Segment) -> Segment:
        """Add the outputs of ``segment`` and return those that were new."""
        is_new = np.zeros(len(segment), np.bool_)
        for origin, number, start, stop in segment.runs():
            missing = self._ranges_of(origin).add(number, number + stop - start)
            for low, high in missing:
                is_new[start + low - number : start + high - number] = True
        return segment.select(is_new)

    def _ranges_of(self, origin: str) -> SequenceRanges:
        ranges = self._origins.pop(origin, None)
        if ranges is None:
            while self._limit.is_reached(len(self._origins)):
                del self._origins[next(iter(self._origins))]
                self._limit.num_known -= 1
            ranges = SequenceRanges()
            self._limit.num_known += 1
        self._origins[origin] = ranges
        return ranges


def checked_ranges(wire: Any) -> OriginRanges:
    """Check what :meth:`SeenOutputs.ranges` returned, received in a message or read from a file.

    Raises:
        SnapshotError: it is something else.
    """
    if not isinstance(wire, dict):
        raise SnapshotError("corrupt: numbers of outputs are missing")
    return {_checked_origin(origin): _checked(intervals) for origin, intervals in wire.items()}


def _checked_origin(origin: Any) -> str:
    if type(origin) is not str:
        raise SnapshotError("corrupt: an origin must be a string")
    return origin


def _checked(intervals: Any) -> list[tuple[int, int]]:
    if not isinstance(intervals, list):
        raise SnapshotError("corrupt: sequence numbers must be a list of intervals")
    return [checked_interval(interval) for interval in intervals]


def checked_interval(wire: Any) -> tuple[int, int]:
    """
    Raises:
        SnapshotError: it is not a pair of numbers.
    """
    if not isinstance(wire, list) or len(wire) != 2:
        raise SnapshotError("corrupt: an interval must be [start, stop]")
    if not all(type(number) is int and 0 <= number < 2**63 for number in wire):
        raise SnapshotError("corrupt: a number is out of range")
    return wire[0], wire[1]
