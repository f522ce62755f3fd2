"""Attention over the KV cache by the compiled kernel, on a CPU.

``benchmarks/few_rows.py`` compares it with PyTorch's (docs/adr/0017).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hdserve.engine.chunk import Chunk
from hdserve.engine.kernel_choice import max_rows_faster
from hdserve.engine.kernels.attention import QUERIES_PER_TILE, attend
from hdserve.engine.kernels.memory import address_of
from hdserve.engine.kernels.vectors import NUM_LANES
from hdserve.engine.kv_cache import KVCache, KVShape, Segment
from hdserve.engine.visible_columns import VisibleColumns, list_columns
from hdserve.engine.workers import Workers

_MIN_PAIRS_PER_THREAD = 16_384
"""Pairs of a query and a key, which take a tenth of a millisecond or so."""

_NO_WINDOW = 1 << 62
_MIN_ROWS = 17
"""Of one sequence, up to which it always attends: with what it takes to be called, as fast as
PyTorch's for one sequence, and three times as fast for sixteen (docs/adr/0017)."""

_TRIED_COUNTS = (16, 64)
_TRIED_KEYS = 256


class TreeAttention:
    """Attends for all sequences of a step in one call.

    What a row gets does not depend on the other rows, bit for bit.

    Args:
        cache: one that :meth:`can_read`.
        workers: share the work.
        max_rows: of one sequence, up to which it is as fast as PyTorch's; see
            :func:`max_attended_rows`.
    """

    def __init__(self, cache: KVCache, workers: Workers, max_rows: int = _MIN_ROWS) -> None:
        self._cache = cache
        self._shape, self._is_bfloat16 = cache.shape, cache.dtype == torch.bfloat16
        self._layers = [_addresses(cache, layer) for layer in range(cache.shape.num_layers)]
        self._workers = workers
        self._scores: list[npt.NDArray[np.float32]] = []
        self._rooms: list[tuple[int, int]] = []
        self.max_rows = max_rows

    @staticmethod
    def can_read(cache: KVCache) -> bool:
        """Whether the kernel knows its device, dtype and sizes."""
        sizes = (cache.shape.key_size, cache.shape.value_size)
        return (
            cache.device.type == "cpu"
            and cache.dtype in (torch.float32, torch.bfloat16)
            and all(size % NUM_LANES == 0 for size in sizes)
        )

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        columns: VisibleColumns,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend with ``query [1, num_heads, num_rows, key_size]``.

        Returns:
            ``[1, num_rows, num_heads, value_size]``, float32; zeros in rows that see nothing.
        """
        num_heads, num_rows = query.shape[1], query.shape[2]
        attended = torch.zeros((1, num_rows, num_heads, self._shape.value_size))
        queries = query.transpose(1, 2).float().contiguous()
        num_parts = self._workers.num_parts(columns.num_visible * num_heads, _MIN_PAIRS_PER_THREAD)
        scores = self._scratch(num_parts, columns.most_visible)
        queries_at, attended_at = queries.data_ptr(), attended.data_ptr()
        stored, listed, is_bfloat16 = self._layers[layer], columns.addresses, self._is_bfloat16

        def work(part: int, first: int, stop: int) -> None:
            attend(
                stored,
                listed,
                queries_at,
                attended_at,
                num_heads,
                *scores[part],
                is_bfloat16,
                scale,
                softcap or 0.0,
                window or _NO_WINDOW,
                first,
                stop,
            )

        self._workers.share(work, len(columns.spans) * self._shape.num_heads, num_parts)
        return attended

    def _scratch(self, num_parts: int, num_columns: int) -> list[tuple[int, int]]:
        """Room for scores, a part each: its address, and how many scores there may be."""
        wanted = num_columns + 2 * NUM_LANES
        if len(self._scores) < num_parts or self._scores[0].shape[1] < wanted:
            shape = (QUERIES_PER_TILE, 2 * wanted)
            self._scores = [np.empty(shape, np.float32) for _ in range(num_parts)]
            self._rooms = [(address_of(room), room.shape[1]) for room in self._scores]
        return self._rooms


@torch.inference_mode()
def max_attended_rows(shape: KVShape, dtype: torch.dtype) -> int:
    """Up to how many rows of one sequence the kernel is as fast as PyTorch's on this machine, tried
    with one layer."""
    cache = KVCache(replace(shape, num_layers=1), _TRIED_KEYS, dtype, torch.device("cpu"))
    if not TreeAttention.can_read(cache):
        return _MIN_ROWS
    kernel = TreeAttention(cache, Workers())
    keys, values = cache.read(0, 0, _TRIED_KEYS)
    query = keys.new_zeros((1, shape.num_heads, _TRIED_COUNTS[-1], shape.key_size))
    mask = query.new_zeros((_TRIED_COUNTS[-1], _TRIED_KEYS))
    segment = Segment(0, _TRIED_KEYS)
    columns = {
        count: list_columns([(0, Chunk(segment, _TRIED_KEYS - count, [0] * count, None), 0)], count)
        for count in _TRIED_COUNTS
    }

    def ours(count: int) -> object:
        return kernel(0, query[:, :, :count], columns[count], 1.0, None, None)

    def theirs(count: int) -> object:
        return F.scaled_dot_product_attention(query[:, :, :count], keys, values, mask[:count])

    return max(_MIN_ROWS, max_rows_faster(_TRIED_COUNTS, ours, theirs))


def _addresses(cache: KVCache, layer: int) -> npt.NDArray[np.int64]:
    """Where the keys and values are, and their sizes; the cache stays where it is."""
    keys, values = (stored[0] for stored in cache.read_all(layer))
    sizes = (*keys.shape, values.shape[2])
    return np.array([keys.data_ptr(), values.data_ptr(), *sizes], np.int64)
