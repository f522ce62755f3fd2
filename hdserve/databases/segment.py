"""A segment: finished outputs of one namespace as flat arrays, in memory, on disk and on the wire.

    origins          ("replica-a", "replica-b")
    origin_index     [0, 0, 1]               which of the origins finished output i
    sequence_numbers [17, 18, 4]             its number among that origin's outputs
    lengths          [3, 1, 2]
    token_ids        [5 9 9 | 7 | 5 9]

``(origin, sequence number)`` names an output for ever.  All merging (retried messages, restarts,
refills from several replicas) is the union of such names, so it may happen in any order and
repeatedly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdserve.databases import snapshot
from hdserve.errors import SnapshotError

TokenIds = Sequence[int] | NDArray[np.uint32]

MAX_OUTPUT_TOKENS = 2**14
"""Most tokens of one output, so that each fits a message; longer text is stored in pieces."""

BYTES_PER_OUTPUT = 14
"""What an output costs in addition to its tokens: origin index, sequence number, length."""

BYTES_PER_TOKEN = 4
_MAX_ORIGINS = 2**14

_FIELDS = ("origin_index", "sequence_numbers", "lengths", "token_ids")
_DTYPES = tuple(np.dtype(code) for code in ("<u2", "<i8", "<u4", "<u4"))
_STORED_DTYPES = (*((dtype,) for dtype in _DTYPES[:-1]), (np.dtype("<u2"), np.dtype("<u4")))
"""Small ids are stored as two bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable outputs of one namespace.

    Attributes:
        origins: ids of the replicas that finished them.
        origin_index: uint16 ``[num_outputs]``.
        sequence_numbers: int64 ``[num_outputs]``, not negative.
        lengths: uint32 ``[num_outputs]``, each from 1 to ``MAX_OUTPUT_TOKENS``.
        token_ids: uint32 ``[sum of lengths]``.
    """

    origins: tuple[str, ...]
    origin_index: NDArray[np.uint16]
    sequence_numbers: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    token_ids: NDArray[np.uint32]

    @classmethod
    def empty(cls) -> Segment:
        """A segment without outputs."""
        return cls((), *(np.empty(0, dtype) for dtype in _DTYPES))

    @classmethod
    def from_outputs(
        cls, origin: str, first_sequence_number: int, outputs: Sequence[NDArray[np.uint32]]
    ) -> Segment:
        """Outputs of one origin, numbered on from ``first_sequence_number``."""
        if not outputs:
            return cls.empty()
        first = first_sequence_number
        return cls(
            origins=(origin,),
            origin_index=np.zeros(len(outputs), np.uint16),
            sequence_numbers=np.arange(first, first + len(outputs), dtype=np.int64),
            lengths=np.fromiter(map(len, outputs), np.uint32, len(outputs)),
            token_ids=np.concatenate(outputs, dtype=np.uint32),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        return BYTES_PER_TOKEN * len(self.token_ids) + BYTES_PER_OUTPUT * len(self.lengths)

    def offsets(self) -> NDArray[np.int64]:
        """int64 ``[num_outputs + 1]``: output ``i`` is ``token_ids[offsets[i]:offsets[i + 1]]``."""
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def outputs(self) -> list[NDArray[np.uint32]]:
        """Each output's token ids, as views."""
        bounds = self.offsets().tolist()
        return [self.token_ids[start:stop] for start, stop in itertools.pairwise(bounds)]

    def select(self, keep: NDArray[np.bool_]) -> Segment:
        """The outputs for which ``keep`` (bool ``[num_outputs]``) holds."""
        if keep.all():
            return self
        used, origin_index = np.unique(self.origin_index[keep], return_inverse=True)
        return Segment(
            origins=tuple(self.origins[index] for index in used.tolist()),
            origin_index=origin_index.astype(np.uint16),
            sequence_numbers=self.sequence_numbers[keep],
            lengths=self.lengths[keep],
            token_ids=self.token_ids[np.repeat(keep, self.lengths)],
        )

    def runs(self) -> list[tuple[str, int, int, int]]:
        """Maximal runs of one origin's consecutive numbers.

        Returns:
            ``(origin, first sequence number, start, stop)`` with indices of outputs.
        """
        if not len(self):
            return []
        is_break = (np.diff(self.origin_index.astype(np.int64)) != 0) | (
            np.diff(self.sequence_numbers) != 1
        )
        starts = [0, *(np.flatnonzero(is_break) + 1).tolist()]
        return [
            (
                self.origins[int(self.origin_index[start])],
                int(self.sequence_numbers[start]),
                start,
                stop,
            )
            for start, stop in zip(starts, [*starts[1:], len(self)], strict=True)
        ]

    def origin_counts(self) -> list[tuple[str, int]]:
        """Origins of the outputs, and how many each has; one that ``origins`` repeats comes
        repeatedly."""
        counts = np.bincount(self.origin_index).tolist()
        return [(self.origins[index], count) for index, count in enumerate(counts) if count]

    def split(self, max_bytes: int) -> list[Segment]:
        """Segments in order, each at most ``max_bytes`` or of a single output."""
        if len(self) <= 1 or self.num_bytes <= max_bytes:
            return [self] if len(self) else []
        offsets = self.offsets()
        ends = offsets * BYTES_PER_TOKEN + BYTES_PER_OUTPUT * np.arange(len(offsets))
        parts, start = [], 0
        while start < len(self):
            stop = int(np.searchsorted(ends, ends[start] + max_bytes, side="right")) - 1
            stop = max(start + 1, stop)
            parts.append(self._slice(start, stop, offsets))
            start = stop
        return parts

    def _slice(self, start: int, stop: int, offsets: NDArray[np.int64]) -> Segment:
        """A copy of the outputs from ``start`` to ``stop``."""
        used, origin_index = np.unique(self.origin_index[start:stop], return_inverse=True)
        return Segment(
            origins=tuple(self.origins[index] for index in used.tolist()),
            origin_index=origin_index.astype(np.uint16),
            sequence_numbers=self.sequence_numbers[start:stop].copy(),
            lengths=self.lengths[start:stop].copy(),
            token_ids=self.token_ids[offsets[start] : offsets[stop]].copy(),
        )

    def to_wire(self) -> dict[str, Any]:
        """The form that :func:`hdserve.databases.snapshot.pack` takes; small ids as two bytes."""
        wire: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        if self.num_tokens and self.token_ids.max() < 2**16:
            wire["token_ids"] = self.token_ids.astype("<u2")
        wire["origins"] = list(self.origins)
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> Segment:
        """The segment that ``to_wire`` described.

        Raises:
            SnapshotError: the fields are missing or contradict one another.
        """
        token_ids = wire.get("token_ids") if isinstance(wire, dict) else None
        if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.uint16:
            wire = {**wire, "token_ids": token_ids.astype("<u4")}
        origins = _checked_origins(wire)
        arrays = [
            _checked_array(wire.get(name), dtype)
            for name, dtype in zip(_FIELDS, _DTYPES, strict=True)
        ]
        return _checked([origins], [(array, np.array([len(array)])) for array in arrays])

    @classmethod
    def from_records(cls, records: Iterable[bytes]) -> Segment:
        """The outputs of all segments whose wire forms were packed into ``records``, in order.
        Thousands of small ones are read two to three times as fast as one by one.

        Raises:
            SnapshotError: one is corrupt, or its fields are missing or contradict one another.
        """
        wires = [snapshot.unpack_lightly(record) for record in records]
        origins = [_checked_origins(wire) for wire in wires]
        columns = [
            snapshot.join_vectors([wire.get(name) for wire in wires], *dtypes)
            for name, dtypes in zip(_FIELDS, _STORED_DTYPES, strict=True)
        ]
        return _checked(origins, columns)


def concatenate(segments: Sequence[Segment]) -> Segment:
    """All outputs of ``segments`` in order."""
    segments = [segment for segment in segments if len(segment)]
    if len(segments) <= 1:
        return segments[0] if segments else Segment.empty()
    origins, origin_index = _joined_origins(
        [segment.origins for segment in segments],
        np.array([len(segment) for segment in segments]),
        np.concatenate([segment.origin_index for segment in segments]),
    )
    return Segment(
        origins=origins,
        origin_index=origin_index,
        sequence_numbers=np.concatenate([segment.sequence_numbers for segment in segments]),
        lengths=np.concatenate([segment.lengths for segment in segments]),
        token_ids=np.concatenate([segment.token_ids for segment in segments]),
    )


def split_output(token_ids: TokenIds) -> list[TokenIds]:
    """One output in pieces of at most ``MAX_OUTPUT_TOKENS``; nothing for an empty one."""
    if 0 < len(token_ids) <= MAX_OUTPUT_TOKENS:
        return [token_ids]
    starts = range(0, len(token_ids), MAX_OUTPUT_TOKENS)
    return [token_ids[start : start + MAX_OUTPUT_TOKENS] for start in starts]


def _checked(
    origins: Sequence[Sequence[str]], columns: Sequence[tuple[NDArray[Any], NDArray[np.int64]]]
) -> Segment:
    """The outputs of several parts.

    Args:
        origins: of each part.
        columns: of each field the items of all parts, and how many each part has.

    Raises:
        SnapshotError: the fields of a part contradict one another.
    """
    (origin_index, num_outputs), (sequence_numbers, num_numbers), *others = columns
    (lengths, num_lengths), (token_ids, num_tokens) = others
    num_origins = np.array([len(each) for each in origins], np.int64)
    ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
    is_valid = (
        np.array_equal(num_outputs, num_numbers)
        and np.array_equal(num_outputs, num_lengths)
        and np.array_equal(ends[np.cumsum(num_lengths)], np.cumsum(num_tokens))
        and (num_origins <= _MAX_ORIGINS).all()
        and (origin_index < np.repeat(num_origins, num_outputs)).all()
        and ((sequence_numbers >= 0) & (sequence_numbers < 2**62)).all()
        and ((lengths >= 1) & (lengths <= MAX_OUTPUT_TOKENS)).all()
    )
    if not is_valid:
        raise SnapshotError("corrupt: the arrays of a segment contradict one another")
    joined, origin_index = _joined_origins(origins, num_outputs, origin_index)
    return Segment(
        origins=joined,
        origin_index=origin_index,
        sequence_numbers=sequence_numbers,
        lengths=lengths,
        token_ids=token_ids.astype("<u4", copy=False),
    )


def _joined_origins(
    origins: Sequence[Sequence[str]], num_outputs: NDArray[np.int64], index: NDArray[np.uint16]
) -> tuple[tuple[str, ...], NDArray[np.uint16]]:
    """One list of the origins of several parts, and the index in it of each output's origin.

    Args:
        origins: of each part.
        num_outputs: how many each part has.
        index: of each output of all parts, in the list of its own.
    """
    numbers: dict[str, int] = {}
    mapped = [numbers.setdefault(origin, len(numbers)) for each in origins for origin in each]
    num_origins = np.array([len(each) for each in origins], np.int64)
    first = np.repeat(np.cumsum(num_origins) - num_origins, num_outputs)
    return tuple(numbers), np.array(mapped, np.uint16)[first + index]


def _checked_origins(wire: Any) -> list[str]:
    origins = wire.get("origins") if isinstance(wire, dict) else None
    if not isinstance(origins, list) or not all(type(origin) is str for origin in origins):
        raise SnapshotError("corrupt: a segment has no valid origins")
    return origins


def _checked_array(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        raise SnapshotError("corrupt: an array of a segment is missing or has another type")
    return value
