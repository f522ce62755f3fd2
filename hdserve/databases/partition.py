"""The log of one namespace: chunks that never change, and a tail that grows.

    namespace "default"
      version    0 ........ 311 | 312 ........ 590 | 591 .. 640 |
                 └─ evicted ──┘   └── chunk ─────┘   └─ tail ─┘  ^ next_version
                                  ^ first_version

Every output gets the next version of its namespace.  A chunk is full and never changes again; the
tail becomes a chunk when the next append would not fit.  A reader keeps one cursor per namespace:
the next version it wants.  A cursor in the evicted part continues at ``first_version``, so a new
reader (cursor 0) gets all that is kept, in replies of bounded size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hdserve.databases.seen_outputs import KeptOrigins, OriginLimit, OriginRanges, SeenOutputs
from hdserve.databases.segment import BYTES_PER_OUTPUT, BYTES_PER_TOKEN, Segment, concatenate

_MAX_TAIL_PARTS = 32
"""Arrays of a single output take many times the bytes of its tokens."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of an append: the outputs that were new, and the chunk they became part of."""

    segment: Segment
    chunk_version: int


class Partition:
    """The log of one namespace.

    Args:
        first_version: the first version number of new outputs.
        chunk_bytes: most bytes of one chunk.
        limit: of the origins whose output names are remembered though no output is kept.

    Attributes:
        chunks: ``(first version, outputs)``, oldest first.
        tail_version: of the first output of the tail.
        flushed_version: everything before it was flushed; readers must forget it too.
        evicted: names of outputs that were dropped since the last flush.
        calibration: opaque state of the drafters, kept and passed on with the outputs.
    """

    __slots__ = (
        "_chunk_bytes",
        "_end_version",
        "_kept",
        "_limit",
        "_seen",
        "_seen_since_flush",
        "_tail",
        "_tail_bytes",
        "calibration",
        "calibration_version",
        "chunks",
        "evicted",
        "flushed_version",
        "next_version",
        "num_bytes",
        "num_outputs",
        "tail_version",
    )

    def __init__(
        self, first_version: int, chunk_bytes: int, limit: OriginLimit | None = None
    ) -> None:
        self.chunks: list[tuple[int, Segment]] = []
        self.next_version = first_version
        self.num_bytes = 0
        self.num_outputs = 0
        self.flushed_version = 0
        self._limit = limit = limit or OriginLimit()
        self._kept = KeptOrigins(limit)
        self.evicted = self._new_names()
        self.calibration = b""
        self.calibration_version = 0
        self._chunk_bytes = chunk_bytes
        self._tail: list[Segment] = []
        self.tail_version = first_version
        self._tail_bytes = 0
        self._end_version = 0
        self._seen = self._new_names()
        self._seen_since_flush = self._new_names()
        """Empty if nothing was flushed: then it would be equal to ``_seen``."""

    @property
    def first_version(self) -> int:
        """The version of the oldest output that is kept."""
        return self.chunks[0][0] if self.chunks else self.tail_version

    @property
    def end_version(self) -> int:
        """One more than the version of the newest output there ever was, flushed or not."""
        return max(self._end_version, self.flushed_version)

    def append(self, segment: Segment) -> Iterator[Appended]:
        """Add the outputs of ``segment`` that were not seen before."""
        new = self._add_seen(segment)
        self.trim_names()
        for part in new.split(self._chunk_bytes):
            if self._tail_bytes + part.num_bytes > self._chunk_bytes:
                self.seal()
            self._tail.append(part)
            if len(self._tail) > _MAX_TAIL_PARTS:
                self._join_tail()
            self._tail_bytes += part.num_bytes
            self.num_bytes += part.num_bytes
            self.num_outputs += len(part)
            self.next_version += len(part)
            self._end_version = self.next_version
            yield Appended(part, self.tail_version)

    def restore(self, first_version: int, segment: Segment) -> None:
        """Add a chunk as it was before a restart; chunks come in ascending order.

        If it is newer than the beginning of this log, as in a database that another process writes,
        the log begins after it.
        """
        segment = self._add_seen(segment)
        if len(segment):
            self.chunks.append((first_version, segment))
            self._end_version = first_version + len(segment)
            self.next_version = max(self.next_version, self._end_version)
            self.tail_version = self.next_version
            self.num_bytes += segment.num_bytes
            self.num_outputs += len(segment)

    def restore_evicted(self, ranges: OriginRanges) -> None:
        """Remember what was evicted before a restart, so that it never returns as new; call it
        after ``flushed_version`` is restored."""
        self.forget_names()
        self.evicted, self._seen = (self._new_names(ranges) for _ in range(2))
        if self.flushed_version:
            self._seen_since_flush = self._new_names(ranges)

    def forget_names(self) -> None:
        """Forget the names of all outputs, so that other namespaces may remember more."""
        for names in self._names:
            names.clear()

    def trim_names(self) -> None:
        """Forget origins of which nothing is kept, as far as they are too many."""
        for names in self._names:
            names.trim()

    @property
    def _names(self) -> tuple[SeenOutputs, ...]:
        return self.evicted, self._seen, self._seen_since_flush

    def _new_names(self, ranges: OriginRanges | None = None) -> SeenOutputs:
        return SeenOutputs(ranges, self._limit, self._kept)

    def _settle_names(self, origins: Iterable[str]) -> None:
        """Note which ``origins`` came or went."""
        for names in self._names:
            names.settle(origins)

    def _add_seen(self, segment: Segment) -> Segment:
        """The outputs of ``segment`` that were not seen before."""
        new = self._seen.add(segment)
        if self.flushed_version:
            self._seen_since_flush.add(new)
        if came := self._kept.add(new):
            self._settle_names(came)
        return new

    def as_imported(self, segment: Segment) -> Segment:
        """The outputs of ``segment`` as an operator's import adds them, flushed or not.

        A name that was flushed is never accepted again, here or by a replica, so after a flush
        outputs that are missing here get new names: the same ones at each import.
        """
        if not self.flushed_version:
            return segment
        missing = SeenOutputs(self._seen_since_flush.ranges()).add(segment)
        origins = tuple(f"{origin}@{self.flushed_version}" for origin in missing.origins)
        return replace(missing, origins=origins)

    def num_bytes_imported(self, segment: Segment) -> int:
        """How many bytes an operator's import of ``segment`` would add."""
        return SeenOutputs(self._seen.ranges()).add(self.as_imported(segment)).num_bytes

    def seal(self) -> None:
        """Make the tail a chunk."""
        if self._tail:
            self.chunks.append((self.tail_version, concatenate(self._tail)))
        self._tail = []
        self._tail_bytes = 0
        self.tail_version = self.next_version

    def join_last(self) -> bool:
        """Make one chunk of the last two, if one follows the other and they are not too large;
        whether they were."""
        if len(self.chunks) < 2:
            return False
        (version, first), (last_version, last) = self.chunks[-2:]
        is_gap = version + len(first) != last_version
        if is_gap or first.num_bytes + last.num_bytes > self._chunk_bytes:
            return False
        self.chunks[-2:] = [(version, concatenate([first, last]))]
        return True

    def evict(self) -> None:
        """Drop the oldest chunk; call ``trim_names`` when it is known which others are kept."""
        if not self.chunks:
            self.seal()
        _, segment = self.chunks.pop(0)
        went = self._kept.remove(segment)
        self.evicted.add(segment)
        self._settle_names(went)
        self.num_bytes -= segment.num_bytes
        self.num_outputs -= len(segment)

    def flush(self) -> None:
        """Drop all outputs, here and at the readers; the flush takes one version number itself."""
        self.seal()
        self.next_version = self.tail_version = self.next_version + 1
        self.chunks.clear()
        self.evicted.clear()
        self._seen_since_flush.clear()
        self._settle_names(self._kept.clear())
        self.trim_names()
        self.num_bytes = self.num_outputs = 0
        self.flushed_version = self.next_version

    @property
    def num_kept_origins(self) -> int:
        """How many origins the outputs that are kept have."""
        return len(self._kept)

    @property
    def is_forgettable(self) -> bool:
        """Whether there is nothing here that a reader needs to know of."""
        return not (self.num_bytes or self.flushed_version or self.calibration)

    def is_flushed_since(self, cursor: int) -> bool:
        """Whether a reader with this cursor has something to forget."""
        return 0 < cursor < self.flushed_version

    def lacks_end_before(self, cursor: int) -> bool:
        """Whether the last outputs before the cursor of an earlier run's reader are missing here.

        If nothing older is here either, they may have been evicted, but count as missing all the
        same.
        """
        if cursor <= max(self.flushed_version, 1) or cursor == self._end_version:
            return False
        segments = self.segments()
        index = bisect_right(segments, cursor, key=lambda item: item[0]) - 1
        if index < 0:
            return True
        version, segment = segments[index]
        return version + len(segment) < cursor

    def is_current(self, cursor: int, calibration_version: int) -> bool:
        """Whether a reader with this cursor and calibration has missed nothing."""
        return cursor >= self.end_version and calibration_version == self.calibration_version

    def _join_tail(self) -> None:
        if len(self._tail) > 1:
            self._tail = [concatenate(self._tail)]

    def segments(self) -> list[tuple[int, Segment]]:
        """``(first version, outputs)`` of all chunks and of the tail."""
        self._join_tail()
        return [*self.chunks, *((self.tail_version, segment) for segment in self._tail)]

    def seen(self) -> OriginRanges:
        """The sequence numbers that were ever appended, including those of evicted outputs."""
        return self._seen.ranges()

    def has_seen(self, origin: str, start: int, stop: int) -> bool:
        """Whether all these numbers of ``origin`` were ever appended."""
        return self._seen.numbers(origin).has_all(start, stop)

    def begin_of_last(self, num_bytes: int) -> int:
        """The version where about the newest ``num_bytes`` of outputs begin, in whole chunks; 0 if
        there are not that many."""
        for version, segment in reversed(self.segments()):
            num_bytes -= segment.num_bytes
            if num_bytes <= 0:
                return version
        return 0

    def since(
        self, cursor: int, exclude_origin: str | None, room: int, *, takes_one: bool
    ) -> tuple[Segment, int, bool]:
        """Outputs from ``cursor`` on, the new cursor, and whether nothing is left.

        The new cursor is one past the last output that existed, not the next one's version: so
        after a restart it tells whether the reader knows outputs that are missing here.

        Args:
            room: most bytes to return.
            takes_one: return one output even if it is larger than that.
        """
        segments = self.segments()
        index = max(bisect_right(segments, cursor, key=lambda item: item[0]) - 1, 0)
        found: list[Segment] = []
        for version, segment in segments[index:]:
            keep, stop = _window(
                segment,
                max(cursor - version, 0),
                exclude_origin,
                room,
                takes_one=takes_one and not found,
            )
            if keep.any():
                found.append(segment.select(keep))
                room -= found[-1].num_bytes
            cursor = max(cursor, version + stop)
            if stop < len(segment):
                return concatenate(found), cursor, False
        return concatenate(found), max(cursor, self.end_version), True

    def missing_from(self, seen: OriginRanges) -> Segment:
        """The outputs that are kept here and not among ``seen`` elsewhere."""
        elsewhere = SeenOutputs(seen)
        return concatenate([elsewhere.add(segment) for _, segment in self.segments()])


def _window(
    segment: Segment, start: int, exclude_origin: str | None, room: int, *, takes_one: bool
) -> tuple[NDArray[np.bool_], int]:
    """Which outputs of ``segment`` from ``start`` on to send, and where to continue."""
    keep = np.ones(len(segment), np.bool_)
    if exclude_origin in segment.origins:
        keep = segment.origin_index != segment.origins.index(exclude_origin)
    keep[:start] = False
    costs = np.where(keep, segment.lengths * BYTES_PER_TOKEN + BYTES_PER_OUTPUT, 0)
    stop = int(np.searchsorted(np.cumsum(costs, dtype=np.int64), room, side="right"))
    if takes_one and stop < len(segment) and not keep[:stop].any():
        stop += 1
    keep[stop:] = False
    return keep, max(stop, start)
