"""Which outputs have been seen: a set of (origin, sequence number), stored as few intervals.

As long as a log keeps any output of an origin, it remembers all numbers of it: otherwise the same
text could be appended twice.  Of origins whose outputs were all dropped, it remembers those that
were met last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np

from hdserve.databases.segment import Segment
from hdserve.errors import SnapshotError

OriginRanges = dict[str, list[tuple[int, int]]]
"""For each origin the half-open intervals of sequence numbers, in ascending order."""

MAX_ORIGINS = 4096
"""The most origins that one namespace remembers although it keeps nothing of them.  Beyond it the
origin seen longest ago is forgotten: most likely a replica that is gone."""

MAX_TOTAL_ORIGINS = 2**14
"""About the most such origins that all namespaces of a log remember."""

MIN_ORIGINS = 64
"""Such origins that a namespace may always remember, however many namespaces there are."""

MAX_KEPT_ORIGINS = 2**14 - MAX_ORIGINS
"""The most origins whose outputs one namespace keeps.  With those of which it keeps nothing they
are as many as a message or a file may name."""

BYTES_PER_ORIGIN = 512
"""About what a namespace takes to remember an origin."""

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
    """How many origins of which nothing is kept the namespaces of a log may remember.

    Attributes:
        num_gone: such origins that all of them together remember.
        num_kept: origins of which something is kept, in all of them together.
    """

    def __init__(self) -> None:
        self.num_gone = 0
        self.num_kept = 0
        self._share = MAX_ORIGINS

    def share(self, num_namespaces: int) -> None:
        """Divide the origins among the current number of namespaces."""
        share = MAX_TOTAL_ORIGINS // max(num_namespaces, 1)
        self._share = min(MAX_ORIGINS, max(MIN_ORIGINS, share))

    def is_exceeded(self, num_gone: int) -> bool:
        """Whether a namespace that remembers ``num_gone`` of them must forget one: it may exceed
        its share only while others use less of theirs."""
        is_full = self.num_gone > MAX_TOTAL_ORIGINS
        return num_gone > (self._share if is_full else MAX_ORIGINS)


class KeptOrigins:
    """The origins of the outputs that a namespace keeps."""

    __slots__ = ("_limit", "_num_outputs")

    def __init__(self, limit: OriginLimit) -> None:
        self._limit = limit
        self._num_outputs: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._num_outputs)

    def __contains__(self, origin: object) -> bool:
        return origin in self._num_outputs

    def add(self, segment: Segment) -> list[str]:
        """The outputs of ``segment`` are kept from now on; returns the origins that came."""
        came = []
        for origin, count in segment.origin_counts():
            if origin not in self._num_outputs:
                came.append(origin)
            self._num_outputs[origin] = self._num_outputs.get(origin, 0) + count
        self._limit.num_kept += len(came)
        return came

    def remove(self, segment: Segment) -> list[str]:
        """The outputs of ``segment``, which were added, are not kept any more; returns the origins
        that went."""
        went = []
        for origin, count in segment.origin_counts():
            self._num_outputs[origin] -= count
            if not self._num_outputs[origin]:
                del self._num_outputs[origin]
                went.append(origin)
        self._limit.num_kept -= len(went)
        return went

    def clear(self) -> list[str]:
        """Nothing is kept any more; returns the origins that went."""
        went = list(self._num_outputs)
        self._num_outputs.clear()
        self._limit.num_kept -= len(went)
        return went


class SeenOutputs:
    """A growing set of output names; it makes merging segments a union of sets.

    Args:
        limit: of the origins that are not in ``kept``.
        kept: the origins that ``trim`` must not forget; tell ``settle`` of those that came or went.
    """

    __slots__ = ("_gone", "_kept", "_limit", "_origins")

    def __init__(
        self,
        ranges: Mapping[str, Iterable[tuple[int, int]]] | None = None,
        limit: OriginLimit | None = None,
        kept: Container[str] = (),
    ) -> None:
        self._limit = limit or OriginLimit()
        self._kept = kept
        self._origins = {
            origin: SequenceRanges(intervals) for origin, intervals in (ranges or {}).items()
        }
        self._gone: dict[str, None] = {}
        """The origins of which nothing is kept; the one met longest ago comes first."""
        self.settle(self._origins)

    def clear(self) -> None:
        """Forget everything."""
        self._limit.num_gone -= len(self._gone)
        self._gone.clear()
        self._origins.clear()

    def ranges(self) -> OriginRanges:
        """The sequence numbers that were seen of each origin; last those that ``trim`` would forget
        last."""
        kept = [origin for origin in self._origins if origin not in self._gone]
        return {origin: self._origins[origin].intervals() for origin in [*kept, *self._gone]}

    def numbers(self, origin: str) -> SequenceRanges:
        """The sequence numbers of the outputs of ``origin`` that were seen."""
        return self._origins.get(origin, SequenceRanges())

    def add(self, segment: Segment) -> Segment:
        """Add the outputs of ``segment`` and return those that were new."""
        is_new = np.zeros(len(segment), np.bool_)
        for origin, number, start, stop in segment.runs():
            ranges = self._origins.setdefault(origin, SequenceRanges())
            for low, high in ranges.add(number, number + stop - start):
                is_new[start + low - number : start + high - number] = True
        self.settle(segment.origins)
        return segment.select(is_new)

    def settle(self, origins: Iterable[str]) -> None:
        """Note whether something of each of ``origins`` is kept now."""
        num_before = len(self._gone)
        for origin in origins:
            self._gone.pop(origin, None)
            if origin in self._origins and origin not in self._kept:
                self._gone[origin] = None
        self._limit.num_gone += len(self._gone) - num_before

    def trim(self) -> None:
        """Forget origins of which nothing is kept, as far as they are too many."""
        while self._limit.is_exceeded(len(self._gone)):
            origin = next(iter(self._gone))
            del self._gone[origin], self._origins[origin]
            self._limit.num_gone -= 1


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
