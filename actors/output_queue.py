"""Finished outputs of a replica that are not published yet: bounded, and never in the way."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hdserve.databases.messages import Standing
from hdserve.databases.segment import BYTES_PER_OUTPUT, BYTES_PER_TOKEN, TokenIds, split_output


@dataclass(slots=True)
class Batch:
    """The content of one message, by namespace."""

    outputs: dict[str, list[NDArray[np.uint32]]] = field(default_factory=dict)
    calibrations: dict[str, bytes] = field(default_factory=dict)
    standings: dict[str, Standing] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.outputs or self.calibrations)


class OutputQueue:
    """Outputs and calibration to be sent to an actor; thread-safe.  When it is full the oldest
    outputs are dropped and counted, and so are calibrations that take more than half of it.

    Attributes:
        num_bytes: of what is queued.
        num_dropped: outputs that were dropped, or were not token ids.
        num_dropped_calibrations: calibrations that were dropped.
        num_forgotten: outputs that were removed by a flush.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_dropped = 0
        self.num_dropped_calibrations = 0
        self.num_forgotten = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._outputs: deque[tuple[str, TokenIds]] = deque()
        self._calibrations: dict[str, tuple[bytes, Standing]] = {}
        self._num_calibration_bytes = 0
        self._namespaces: set[str] = set()

    def put(self, namespace: str, token_ids: TokenIds) -> None:
        """Queue one output; it must not be changed afterwards.  Takes about a microsecond."""
        with self._lock:
            self._namespaces.add(namespace)
            for piece in split_output(token_ids):
                self._outputs.append((namespace, piece))
                self.num_bytes += _cost(piece)
            self._drop_outputs()

    def put_calibration(self, namespace: str, calibration: bytes, standing: Standing) -> None:
        """Queue calibration state; replaces what was queued before for ``namespace``."""
        with self._lock:
            self._namespaces.add(namespace)
            self._remove_calibration(namespace)
            self._calibrations[namespace] = calibration, standing
            self._count_calibration(len(calibration))
            while self._num_calibration_bytes > self._max_bytes // 2:
                self._remove_calibration(next(iter(self._calibrations)))
                self.num_dropped_calibrations += 1
            self._drop_outputs()

    def has_calibration(self, namespace: str) -> bool:
        """Whether calibration state of ``namespace`` is queued."""
        with self._lock:
            return namespace in self._calibrations

    def forget(self, namespace: str) -> bool:
        """Drop what is queued of ``namespace``; whether anything was queued since the last time."""
        with self._lock:
            self._remove_calibration(namespace)
            num_before = len(self._outputs)
            self._outputs = deque(item for item in self._outputs if item[0] != namespace)
            self.num_forgotten += num_before - len(self._outputs)
            num_output_bytes = sum(_cost(token_ids) for _, token_ids in self._outputs)
            self.num_bytes = num_output_bytes + self._num_calibration_bytes
            was_used = namespace in self._namespaces
            self._namespaces.discard(namespace)
            return was_used

    def take(self, max_bytes: int) -> Batch:
        """The oldest calibrations and outputs, up to ``max_bytes``.  Where there are both, each
        gets half of that, or what the other leaves, and at least one item."""
        batch = Batch()
        with self._lock:
            room = max_bytes // 2 if self._outputs else max_bytes
            size = self._take_calibrations(batch, room)
            taken = self._take_outputs(max(max_bytes - size, max_bytes // 2))
        for namespace, token_ids in taken:
            try:
                array = np.asarray(token_ids, np.uint32).reshape(len(token_ids))
            except (OverflowError, TypeError, ValueError):
                with self._lock:
                    self.num_dropped += 1
            else:
                batch.outputs.setdefault(namespace, []).append(array)
        return batch

    def _take_calibrations(self, batch: Batch, room: int) -> int:
        """Move the oldest calibrations to ``batch``; returns their bytes."""
        size = 0
        for namespace, (calibration, standing) in list(self._calibrations.items()):
            if size and size + len(calibration) > room:
                break
            self._remove_calibration(namespace)
            batch.calibrations[namespace] = calibration
            batch.standings[namespace] = standing
            size += len(calibration)
        return size

    def _take_outputs(self, room: int) -> list[tuple[str, TokenIds]]:
        taken: list[tuple[str, TokenIds]] = []
        while self._outputs and (not taken or _cost(self._outputs[0][1]) <= room):
            taken.append(self._pop())
            room -= _cost(taken[-1][1])
        return taken

    def _remove_calibration(self, namespace: str) -> None:
        calibration, _ = self._calibrations.pop(namespace, (b"", None))
        self._count_calibration(-len(calibration))

    def _count_calibration(self, num_bytes: int) -> None:
        self._num_calibration_bytes += num_bytes
        self.num_bytes += num_bytes

    def _drop_outputs(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._pop()
            self.num_dropped += 1

    def _pop(self) -> tuple[str, TokenIds]:
        namespace, token_ids = self._outputs.popleft()
        self.num_bytes -= _cost(token_ids)
        return namespace, token_ids


def _cost(token_ids: TokenIds) -> int:
    return BYTES_PER_TOKEN * len(token_ids) + BYTES_PER_OUTPUT
