"""The bounded, versioned log of what one model generated, separate for each namespace.

A reader keeps one cursor per namespace: the next version it wants.  Nothing here does I/O or
depends on time; :mod:`hdserve.databases.output_store` keeps the log on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from hdserve.databases.partition import Appended, Partition
from hdserve.databases.seen_outputs import (
    BYTES_PER_ORIGIN,
    MAX_KEPT_ORIGINS,
    MAX_TOTAL_ORIGINS,
    OriginLimit,
)
from hdserve.databases.segment import Segment
from hdserve.errors import DatabaseError

CHUNK_BYTES = 2**18
MIN_CHUNK_BYTES = 2**14
MAX_CALIBRATION_BYTES = 2**16

CALIBRATION_SHARE = 8
"""The calibrations of all namespaces may take this share of the outputs' limit, in addition."""

NAMESPACE_SHARE = 8
NAMESPACE_BYTES = 2**12
"""About what a namespace takes in addition to its content.  Namespaces created by an import may
take the share above of the outputs' limit."""

CHANGE_BYTES = 216
"""The bytes that the fields of one namespace take in a reply, without its outputs, calibration and
name."""

SPARE_SHARE = 64
"""When all are too large together, this share more is given up, so that it happens seldom."""

MAX_SPARE_BYTES = 8 * CHUNK_BYTES
"""But no more than this: giving up a chunk takes 8 ms where it holds 2,788 outputs of 20 tokens, of
50 replicas in turn, and nobody is answered meanwhile."""

MIN_CLEARED_PARTITIONS = 2**13
"""Empty partitions are only removed when there are this many partitions."""

_ORIGIN_BYTES = 3

MergeCalibration = Callable[[bytes, bytes], bytes]
"""``merge(kept, new)`` returns the calibration to keep."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a reader of one namespace has missed.

    Attributes:
        segment: outputs it does not have, in order.
        cursor: where it continues.
        is_complete: whether nothing more is waiting.
        is_flushed: it must forget all it has of this namespace, then take ``segment``.
        calibration: the newest state, if it is newer than the reader's.
    """

    segment: Segment
    cursor: int
    is_complete: bool
    is_flushed: bool = False
    calibration: bytes | None = None
    calibration_version: int = 0

    @classmethod
    def waiting(cls, cursor: int, calibration_version: int) -> Changes:
        """Says that there is something that did not fit into the reply."""
        return cls(Segment.empty(), cursor, False, calibration_version=calibration_version)

    @property
    def num_bytes(self) -> int:
        """About how much of a message it takes, without the name of the namespace."""
        origins = sum(len(origin) + _ORIGIN_BYTES for origin in self.segment.origins)
        return CHANGE_BYTES + origins + self.segment.num_bytes + len(self.calibration or b"")


class OutputLog:
    """The logs of all namespaces of one model; no output ever moves between them.

    Not thread-safe.

    Args:
        max_bytes: most bytes of one namespace; the oldest outputs are dropped first.
        max_total_bytes: most bytes of all together; the largest namespace gives way first, so a
            busy tenant does not push out a quiet one.  The origins of all outputs that are kept
            may take about as much again.
        first_version: the first version number of new outputs, at least 1: a cursor of 1 means
            from the beginning, and 0 the same for a reader that has nothing to forget.
        merge_calibration: merges the calibration of two replicas; without it the last one written
            is kept.

    Attributes:
        num_bytes: of the outputs kept.
        num_calibration_bytes: when over its limit, the calibration set longest ago is dropped.
    """

    def __init__(
        self,
        max_bytes: int,
        max_total_bytes: int,
        *,
        first_version: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        merge_calibration: MergeCalibration | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._first_version = first_version
        self._chunk_bytes = min(chunk_bytes, max(max_bytes // 4, MIN_CHUNK_BYTES))
        self._merge_calibration = merge_calibration
        self._partitions: dict[str, Partition] = {}
        self._origin_limit = OriginLimit()
        self._max_origins = max(max_total_bytes // BYTES_PER_ORIGIN, MAX_TOTAL_ORIGINS)
        self._max_partitions = MIN_CLEARED_PARTITIONS
        self._is_restoring = False
        self._calibrations: dict[str, int] = {}
        self._calibration_version = first_version
        self.num_bytes = 0
        self.num_calibration_bytes = 0

    def namespaces(self) -> list[str]:
        return list(self._partitions)

    def partition(self, namespace: str) -> Partition:
        """The log of ``namespace``, created if there is none."""
        partition = self._partitions.get(namespace)
        if partition is None:
            self._remove_empty()
            partition = Partition(self._first_version, self._chunk_bytes, self._origin_limit)
            self._partitions[namespace] = partition
            self._origin_limit.share(len(self._partitions))
        return partition

    def peek(self, namespace: str) -> Partition:
        """The log of ``namespace``; if there is none an empty one, which is not kept."""
        partition = self._partitions.get(namespace)
        return partition or Partition(self._first_version, self._chunk_bytes)

    def has_room(self, namespaces: Iterable[str], max_total_bytes: int | None = None) -> bool:
        """Whether these namespaces, which others than this cluster have named, may be added.  One
        that was flushed, and of which nothing has come since, takes no room.

        Args:
            max_total_bytes: instead of the log's own.
        """
        parts = self._partitions.items()
        used = {name for name, each in parts if each.num_bytes or each.calibration}
        num_new = sum(name not in used for name in namespaces)
        most = (max_total_bytes or self._max_total_bytes) // NAMESPACE_SHARE // NAMESPACE_BYTES
        most = max(most, MIN_CLEARED_PARTITIONS)
        return not num_new or len(used) + num_new <= most

    def append(self, namespace: str, segment: Segment) -> list[Appended]:
        """Add outputs; those that were appended before are left out.

        Returns:
            The new outputs, in parts that each belong to one chunk.
        """
        appended = list(self.partition(namespace).append(segment))
        self.num_bytes += sum(item.segment.num_bytes for item in appended)
        self._evict(namespace)
        return appended

    def restore(self, namespace: str, first_version: int, segment: Segment) -> None:
        """Put a chunk back as it was; only before the first append to ``namespace``.  Call
        ``end_restore`` after all chunks."""
        self._is_restoring = True
        partition = self.partition(namespace)
        self.num_bytes -= partition.num_bytes
        partition.restore(first_version, segment)
        self.num_bytes += partition.num_bytes
        self._evict(namespace)

    def end_restore(self) -> None:
        """Forget names that are too many, now that it is known which outputs are kept."""
        self._is_restoring = False
        for partition in self._partitions.values():
            partition.trim_names()

    def changes_since(
        self,
        cursors: Mapping[str, int],
        *,
        max_bytes: int,
        exclude_origin: str | None = None,
        calibration_versions: Mapping[str, int] | None = None,
        takes_one: bool = True,
        catch_up_bytes: int | None = None,
    ) -> dict[str, Changes]:
        """What a reader has missed in each namespace it names; only those with changes.

        The first of them that does not fit comes back with ``is_complete=False``, and those after
        it are left out, so a reader should name them in another order each time.

        Args:
            cursors: for each namespace the next version the reader wants.
            max_bytes: about how much of a message the changes may take in all.
            exclude_origin: the reader itself.
            calibration_versions: of the calibrations the reader has.
            takes_one: return one output, or calibration, even if it is larger than that.
            catch_up_bytes: how much of the newest outputs a reader wants that is further behind.
        """
        changes: dict[str, Changes] = {}
        room = max_bytes
        for namespace, cursor in cursors.items():
            partition = self._partitions.get(namespace)
            known = (calibration_versions or {}).get(namespace, 0)
            if partition is None or partition.is_current(cursor, known):
                continue
            is_first = takes_one and not changes
            if room < CHANGE_BYTES + len(namespace) and not is_first:
                change = Changes.waiting(cursor, known)
            else:
                begin = cursor
                if catch_up_bytes is not None:
                    begin = max(cursor, partition.begin_of_last(catch_up_bytes))
                change = self._changes(
                    partition, cursor, begin, known, exclude_origin, room, is_first=is_first
                )
            is_news = change.cursor != cursor or change.calibration_version != known
            if is_news or not change.is_complete:
                changes[namespace] = change
                room -= len(namespace) + change.num_bytes
            if not change.is_complete:
                break
        return changes

    def flushes_since(self, cursors: Mapping[str, int]) -> dict[str, Changes]:
        """Which namespaces a reader, who only wants to know of flushes there, must forget."""
        changes = {}
        for namespace, cursor in cursors.items():
            partition = self._partitions.get(namespace)
            if partition is not None and partition.is_flushed_since(cursor):
                flushed = partition.flushed_version
                changes[namespace] = Changes(Segment.empty(), flushed, True, is_flushed=True)
        return changes

    def _changes(
        self,
        partition: Partition,
        cursor: int,
        begin: int,
        known_calibration: int,
        origin: str | None,
        room: int,
        *,
        is_first: bool,
    ) -> Changes:
        if not is_first:
            room -= CHANGE_BYTES
        is_flushed = partition.is_flushed_since(cursor)
        calibration = None
        version = partition.calibration_version
        if version != known_calibration:
            calibration = partition.calibration
            if len(calibration) > room and not is_first:
                return Changes.waiting(cursor, known_calibration)
        num_bytes = len(calibration or b"")
        segment, end, is_complete = partition.since(
            begin, origin, room - num_bytes, takes_one=is_first and not num_bytes
        )
        if is_first and num_bytes and not len(segment) and not is_complete:
            # An output too long to go beside a calibration goes first: that may be new each time.
            segment, end, _ = partition.since(begin, origin, room, takes_one=True)
            return Changes(segment, end, False, is_flushed, None, known_calibration)
        return Changes(segment, end, is_complete, is_flushed, calibration, version)

    def set_calibration(self, namespace: str, blob: bytes) -> list[str]:
        """Set the calibration of ``namespace`` to ``blob``, merged with the kept one if possible.

        The kept one is replaced if it cannot be merged and ``blob`` can, as after an upgrade, or if
        both together are too large.

        Returns:
            The namespaces whose calibrations have changed: ``namespace``, and those that gave way.

        Raises:
            DatabaseError: it is larger than ``MAX_CALIBRATION_BYTES``, or cannot be merged.
        """
        partition = self.partition(namespace)
        if self._merge_calibration and partition.calibration:
            merged = _merged(self._merge_calibration, partition.calibration, blob)
            blob = merged if len(merged) <= MAX_CALIBRATION_BYTES else blob
        if len(blob) > MAX_CALIBRATION_BYTES:
            raise DatabaseError(
                f"a calibration of {len(blob)} bytes is over the {MAX_CALIBRATION_BYTES} allowed"
            )
        return [namespace, *self.put_calibration(namespace, blob)]

    def put_calibration(self, namespace: str, blob: bytes) -> list[str]:
        """Store a calibration as the newest, with a version that no other has or had: it is new to
        all readers.

        Returns:
            The namespaces whose calibrations gave way.
        """
        self._calibration_version += 1
        partition = self.partition(namespace)
        partition.calibration = blob
        partition.calibration_version = self._calibration_version
        self.num_calibration_bytes += len(blob) - self._calibrations.pop(namespace, 0)
        if blob:
            self._calibrations[namespace] = len(blob)
        limit = max(self._max_total_bytes // CALIBRATION_SHARE, MAX_CALIBRATION_BYTES)
        dropped: list[str] = []
        while self.num_calibration_bytes > limit:
            dropped.append(next(iter(self._calibrations)))
            self.num_calibration_bytes -= self._calibrations.pop(dropped[-1])
            self._partitions[dropped[-1]].calibration = b""
        return dropped

    def flush(self, namespace: str) -> None:
        """Forget ``namespace``, and make its readers forget it."""
        partition = self.partition(namespace)
        self.num_bytes -= partition.num_bytes
        partition.flush()
        self.put_calibration(namespace, b"")

    def _evict(self, namespace: str) -> None:
        partition = self._partitions[namespace]
        while self._is_too_large(partition):
            self._evict_oldest(partition)
        if self.num_bytes > self._max_total_bytes:
            limit = max(_spared(self._max_total_bytes), self._max_total_bytes - MAX_SPARE_BYTES)
            self._evict_from(lambda each: -each.num_bytes, lambda: self.num_bytes > limit)
        if self._origin_limit.num_kept > self._max_origins:
            most = _spared(self._max_origins)
            self._evict_from(_bytes_per_origin, lambda: self._origin_limit.num_kept > most)

    def _is_too_large(self, partition: Partition) -> bool:
        has_too_many = partition.num_kept_origins > MAX_KEPT_ORIGINS
        return partition.num_bytes > self._max_bytes or has_too_many

    def _evict_from(self, key: Callable[[Partition], float], is_over: Callable[[], bool]) -> None:
        """While ``is_over``, drop the oldest chunk of the partition with the lowest ``key``."""
        lowest = [(key(each), name) for name, each in self._partitions.items()]
        heapify(lowest)
        while is_over():
            _, name = heappop(lowest)
            partition = self._partitions[name]
            self._evict_oldest(partition)
            heappush(lowest, (key(partition), name))

    def _evict_oldest(self, partition: Partition) -> None:
        self.num_bytes -= partition.num_bytes
        partition.evict()
        if not self._is_restoring:
            partition.trim_names()
        self.num_bytes += partition.num_bytes

    def _remove_empty(self) -> None:
        """If there are many partitions, forget those whose outputs were all evicted.

        Later outputs of their namespaces get higher numbers than all before, for readers' cursors.
        """
        if len(self._partitions) < self._max_partitions:
            return
        for name, partition in list(self._partitions.items()):
            if partition.is_forgettable:
                self._first_version = max(self._first_version, partition.next_version)
                partition.forget_names()
                del self._partitions[name]
        self._max_partitions = max(MIN_CLEARED_PARTITIONS, 2 * len(self._partitions))


def _spared(limit: int) -> int:
    return limit - limit // SPARE_SHARE


def _bytes_per_origin(partition: Partition) -> float:
    """Where it is lowest, forgetting an origin costs the least text."""
    num_origins = partition.num_kept_origins
    return partition.num_bytes / num_origins if num_origins else inf


def _merged(merge: MergeCalibration, kept: bytes, new: bytes) -> bytes:
    """
    Raises:
        DatabaseError: ``new`` cannot be merged, not even with itself.
    """
    try:
        return merge(kept, new)
    except Exception as reason:
        try:
            merge(new, new)
        except Exception as error:
            raise DatabaseError(f"calibration cannot be merged: {reason}") from error
        return new
