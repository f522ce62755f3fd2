"""The keys and values of all sequences, in rows; each sequence owns a segment of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hdserve.engine import gpu_kernels
from hdserve.engine.kernels.moves import BYTES_AT_ONCE, move_rows
from hdserve.engine.kv_cache.segments import ROW_ALIGNMENT, Owned, RowAllocator, Segment, align
from hdserve.engine.kv_cache.shape import KVShape, LayerShape

if TYPE_CHECKING:
    from hdserve.engine.gpu_kernels.move import RowMover

STORED_ALIGNMENT = 128
"""The number of stored rows is a multiple of this, so that attention may read them in
blocks."""

_ROWS_COPIED_AT_ONCE = 1024
"""Rows copied at once if the rows that are read and those that are written overlap.  They are
copied twice, so the number is small."""


class KVCache:
    """Keys ``[heads, rows, key_size]`` and values ``[heads, rows, value_size]`` of every layer.

    The rows of one head are contiguous, as attention reads them (on a CPU a fifth faster than with
    the heads of one row together).  Layers of one shape are one tensor, so that a move is one call.

    Column ``c`` of a segment holds the ``c``-th token of its sequence; the columns after the
    committed ones hold the nodes of the draft tree under verification::

        column     0 ... num_cached-1 | num_cached ... num_cached + nodes - 1 | unused
                   committed          | node 0, node 1, ...                   |

    ``keep`` moves the nodes of the accepted path to the columns they are committed to.  Rows are
    zero at first.  Free rows, and rows of rejected drafts, may hold NaN or infinity, which spoils a
    weighted sum even at a weight of 0; so whoever reads rows that the sequence has not written
    clears them first.

    Attributes:
        rows: gives them away and takes them back.
        is_read_whole: whether :meth:`read_all` is used; then only finite values are stored.
    """

    def __init__(
        self, shape: KVShape, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_rows = align(num_rows)
        self.rows = RowAllocator(self.num_rows)
        with_scratch = self.num_rows + ROW_ALIGNMENT
        self.num_stored_rows = align(with_scratch, STORED_ALIGNMENT)
        self.dtype = dtype
        self.is_read_whole = False
        self._stored: list[torch.Tensor] = []
        """``[layers of a shape, heads, rows, size]``: keys and values in alternation."""
        found: dict[LayerShape, Iterator[tuple[torch.Tensor, torch.Tensor]]] = {}
        for layer, number in Counter(shape.layers).items():
            size = (number, layer.num_heads, self.num_stored_rows)
            keys = torch.zeros((*size, layer.key_size), dtype=dtype, device=device)
            values = torch.zeros((*size, layer.value_size), dtype=dtype, device=device)
            self._stored += keys, values
            found[layer] = zip(keys.unsqueeze(1), values.unsqueeze(1), strict=True)
        self._layers = [next(found[layer]) for layer in shape.layers]
        self._store_rows: Callable[..., None] | None = None
        self._mover: RowMover | None = None
        if gpu_kernels.are_available(device):
            from hdserve.engine.gpu_kernels.move import RowMover
            from hdserve.engine.gpu_kernels.store import store_rows

            self._store_rows, self._mover = store_rows, RowMover(device)

    @property
    def device(self) -> torch.device:
        return self._stored[0].device

    @property
    def scratch_row(self) -> int:
        """The row where the keys of padding rows are written; nothing reads it."""
        return self.num_rows

    def clear(self, segment: Segment) -> None:
        """Set its rows to zero, as they may hold NaN or infinity."""
        for stored in self._stored:
            stored.narrow(2, segment.start, segment.num_rows).zero_()

    def compact(self, owned: Sequence[Owned]) -> list[Segment]:
        """Move all segments to the beginning, so that the free rows are contiguous, and let them
        grow.

        Args:
            owned: every segment; there must be enough free rows for those that grow.

        Returns:
            Where each of them is now.
        """
        in_order = sorted(owned, key=lambda one: one.segment.start)
        starts, next_row = [], 0
        for one in in_order:
            self.copy(one.segment.start, next_row, one.num_used)
            starts.append(next_row)
            next_row += one.segment.num_rows
        assert next_row + self.rows.num_free == self.num_rows, "a segment was forgotten"
        moved: dict[Segment, Segment] = {}
        end = num_taken = sum(one.num_rows for one in in_order)
        assert num_taken <= self.num_rows, "there is no room to grow"
        for one, start in zip(reversed(in_order), reversed(starts), strict=True):
            end -= one.num_rows
            self.copy(start, end, one.num_used)
            moved[one.segment] = Segment(end, one.num_rows)
        self.rows.join(0, self.num_rows, Segment(num_taken, self.num_rows - num_taken))
        return [moved[one.segment] for one in owned]

    def push(self, segments: Sequence[Segment], start: int, end: int, to: int) -> list[Segment]:
        """Move ``segments``, all that are between rows ``start`` and ``end``, next to each other;
        no other row there may be taken.  The free rows between become one gap.

        Args:
            segments: in order.
            to: ``start`` or ``end``, the side they are moved to.

        Returns:
            Where each of them is now.
        """
        num_rows = sum(segment.num_rows for segment in segments)
        assert num_rows < end - start, "no row is free"
        first = start if to == start else end - num_rows
        targets = accumulate((segment.num_rows for segment in segments), initial=first)
        moved = [
            Segment(target, old.num_rows) for old, target in zip(segments, targets, strict=False)
        ]
        pairs = list(zip(segments, moved, strict=True))
        for old, new in pairs if to == start else reversed(pairs):
            self.copy(old.start, new.start, old.num_rows)
        gap_start = start + num_rows if to == start else start
        self.rows.join(start, end, Segment(gap_start, end - start - num_rows))
        return moved

    def copy(self, source: int, target: int, num_rows: int) -> None:
        """Copy ``num_rows`` rows from row ``source`` to row ``target`` in all layers, as if
        simultaneously."""
        if source == target or not num_rows:
            return
        distance = abs(source - target)
        at_once = max(distance, _ROWS_COPIED_AT_ONCE)
        firsts = range(0, num_rows, at_once)
        for first in firsts if target < source else reversed(firsts):
            number = min(at_once, num_rows - first)
            for stored in self._stored:
                rows = stored.narrow(2, source + first, number)
                rows = rows.clone() if number > distance else rows
                stored.narrow(2, target + first, number).copy_(rows)

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``keys [1, heads, n, key_size]`` and ``values [1, heads, n, value_size]`` at
        ``rows [n]``.

        Where float16 overflowed, zeros are stored.  If all rows are read, non-finite values are
        stored as zeros and their row's keys as NaN: masked rows then do no harm, and rows that see
        the key get NaN.
        """
        own_keys, own_values = self._layers[layer]
        if self.is_read_whole and self._store_rows is not None:
            self._store_rows(rows, keys, values, own_keys, own_values)
            return
        if self.dtype == torch.float16:
            keys = keys.nan_to_num(0.0, 0.0, 0.0)
            values = values.nan_to_num(0.0, 0.0, 0.0)
        elif self.is_read_whole:
            is_number = values.isfinite()
            keys = keys.masked_fill(~is_number.all(dim=-1, keepdim=True), torch.nan)
            values = values.where(is_number, 0.0)
        own_keys.index_copy_(2, rows, keys)
        own_values.index_copy_(2, rows, values)

    def read(self, layer: int, start: int, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[1, heads, num_keys, size]`` of the rows from ``start``."""
        keys, values = self._layers[layer]
        return keys.narrow(2, start, num_keys), values.narrow(2, start, num_keys)

    def read_all(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[1, heads, all rows, size]``."""
        return self._layers[layer]

    def keep(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows ``(source, target)`` in all layers, as if simultaneously: no source row is the
        target of an earlier move."""
        if not moves:
            return
        if self._mover is not None:
            self._mover(self._stored, moves)
            return
        rows = np.array(moves, np.int64)
        for stored in self._stored:
            _move(stored, rows)


def _move(stored: torch.Tensor, moves: npt.NDArray[np.int64]) -> None:
    """Copy rows of a tensor.  On a CPU the kernel does it if it supports the row size: 8 us for two
    rows of 8 layers of hdserve-tiny, where indexing takes 54."""
    num_layers, num_heads, num_rows, size = stored.shape
    if stored.device.type == "cpu" and size * stored.itemsize % BYTES_AT_ONCE == 0:
        num_words = size * stored.itemsize // 4
        moved = np.empty((len(moves), num_words), np.float32)
        move_rows(stored.data_ptr(), num_layers * num_heads, num_rows, num_words, moves, moved)
        return
    sources, targets = torch.from_numpy(moves).to(stored.device).unbind(1)
    stored[:, :, targets] = stored[:, :, sources]
