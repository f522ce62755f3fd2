"""Attention over the KV cache by the compiled kernel, on a CPU.

``benchmarks/few_rows.py`` compares it with PyTorch's (docs/adr/0017).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hdserve.databases.cache_lines import LINE_WORDS, address_of, new_lines
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.placed_chunks import PlacedChunks
from hdserve.engine.batch.visible_columns import VisibleColumns, list_columns
from hdserve.engine.hardware.devices import has_amx_bf16
from hdserve.engine.hardware.kernel_choice import max_rows_faster
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.amx_attention import (
    NUMBERS_AT_ONCE,
    TAIL,
    attend_with_amx,
    scratch_floats,
)
from hdserve.engine.kernels.attention import attend
from hdserve.engine.kernels.attention_call import QUERIES_PER_TILE
from hdserve.engine.kernels.bf16_dot_attention import attend_by_bf16_dot
from hdserve.engine.kernels.pairs import NUM_PAIRED
from hdserve.engine.kernels.registers import HAS_AMX, HAS_AVX512_BF16, NUM_LANES
from hdserve.engine.kernels.tiles import PAIRED
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment, align
from hdserve.engine.kv_cache.shape import KVShape, LayerShape

MIN_PAIRS_PER_THREAD = 16_384
"""The fewest pairs of a query and a key that a thread is given; they take about 50 us."""

PAIRS_PER_KEY = 3
"""The number of pairs that take as long as reading a key and its value for the first query."""

UNLIMITED = 1 << 30
NO_WINDOW = 1 << 62
SPARE_COLUMNS = 64
_MIN_ROWS = 17
"""The kernel always attends for sequences of up to this many rows.  Including its call it takes as
long as PyTorch for one sequence, and a third as long for sixteen (docs/adr/0017)."""

_TRIED_ROWS = 256
"""The trial's rows of a prompt, after as many cached ones.  With 16 or 64 rows the kernel takes
about as long as PyTorch, with 256 and heads of 64 numbers half as long, and less with more."""


class CpuTreeAttention:
    """Attends for all sequences of a step in one call.

    A row's result does not depend on the other rows, bit for bit.  On processors with AMX tiles, it
    is as fast as PyTorch's for prompts too.

    Args:
        cache: one that :meth:`can_read`.
        workers: share the work.
        max_rows: of one sequence, up to which it is as fast as PyTorch's; see
            :func:`max_attended_rows`.
        uses_amx: ``False`` does not use the processor's tiles, if it has any.
        uses_bf16_dot: ``False`` does not use its products of pairs; native operators ignore this.

    Attributes:
        layers_at: the address of int64 ``[num_layers, 6]``: addresses of keys and values, and their
            four sizes.
        uses_amx: whether it does.
        scratch_floats: float32 of scratch that a thread needs in addition to its scores.
        max_depth: of drafts, up to which a row's result does not depend on where they lie.
    """

    def __init__(
        self,
        cache: KVCache,
        workers: Workers,
        max_rows: int = _MIN_ROWS,
        *,
        uses_amx: bool = True,
        uses_bf16_dot: bool = True,
    ) -> None:
        self._cache = cache
        self._shape = cache.shape
        self._layers = np.array(
            [_addresses(cache, layer) for layer in range(cache.shape.num_layers)], np.int64
        )
        self.layers_at = address_of(self._layers)
        self._workers = workers
        self.uses_amx = uses_amx and self._fits_amx()
        self.max_depth = TAIL if self.uses_amx else UNLIMITED
        largest = max(layer.key_size for layer in cache.shape.layers)
        self.scratch_floats = scratch_floats(largest) if self.uses_amx else 0
        self.max_rows = max_rows
        self._takes_bf16_dot = [
            uses_bf16_dot and not self.uses_amx and _fits_bf16_dot(layer, cache.dtype)
            for layer in cache.shape.layers
        ]
        self._lines: list[npt.NDArray[np.uint32]] = []
        self._rooms: list[tuple[int, int]] = []

    @staticmethod
    def can_read(cache: KVCache) -> bool:
        """Whether the kernel supports its device, dtype and sizes."""
        return (
            cache.device.type == "cpu"
            and cache.dtype in (torch.float32, torch.bfloat16)
            and all(
                layer.key_size % NUM_LANES == layer.value_size % NUM_LANES == 0
                for layer in cache.shape.layers
            )
        )

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        columns: VisibleColumns,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with ``query [1, num_heads, num_rows, key_size]``.

        Args:
            sinks: ``[num_heads]``, see :func:`~hdserve.engine.attention.packed.packed_attention`.

        Returns:
            ``[1, num_rows, num_heads, value_size]``, float32; zeros in rows that see nothing.
        """
        num_heads, num_rows = query.shape[1], query.shape[2]
        shape = self._shape.layers[layer]
        attended = torch.zeros((1, num_rows, num_heads, shape.value_size))
        kernel, takes_floats, kind = self._kernel(layer)
        dtype = torch.float32 if takes_floats else torch.bfloat16
        queries = query.transpose(1, 2).to(dtype).contiguous()
        num_pairs = columns.num_visible * num_heads
        num_pairs += columns.num_shared * shape.num_heads * PAIRS_PER_KEY
        num_parts = self._workers.num_parts(num_pairs, MIN_PAIRS_PER_THREAD)
        rooms = self._scratch(num_parts, columns.most_visible + num_rows)
        fixed = (
            self.layers_at + layer * self._layers.strides[0],
            address_of(columns.addresses),
            queries.data_ptr(),
            attended.data_ptr(),
            num_heads,
        )
        sinks = None if sinks is None else sinks.float().contiguous()
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        window = NO_WINDOW if window is None else window
        terms = (float(scale), float(softcap or 0.0), window, sinks_at)

        def work(part: int, first: int, stop: int) -> None:
            kernel(*fixed, *rooms[part], *kind, *terms, first, stop)

        self._workers.share(work, len(columns.spans) * shape.num_heads, num_parts)
        return attended

    def _kernel(self, layer: int) -> tuple[Callable[..., None], bool, tuple[int, ...]]:
        """The kernel of a layer, whether it takes queries in float32, and its further arguments."""
        if self.uses_amx:
            return attend_with_amx, False, ()
        if self._takes_bf16_dot[layer]:
            return attend_by_bf16_dot, False, ()
        return attend, True, (int(self._cache.dtype == torch.bfloat16),)

    def _scratch(self, num_parts: int, num_columns: int) -> list[tuple[int, int]]:
        """Scratch memory for scores, one for each part: its address and its number of columns."""
        wanted = num_columns + SPARE_COLUMNS
        if len(self._rooms) < num_parts or self._rooms[0][1] < wanted:
            wanted = align(2 * wanted, LINE_WORDS)
            num_lines = -(-(QUERIES_PER_TILE * wanted + self.scratch_floats) // LINE_WORDS)
            self._lines = [new_lines(num_lines) for _ in range(num_parts)]
            self._rooms = [(address_of(lines), wanted) for lines in self._lines]
        return self._rooms

    def _fits_amx(self) -> bool:
        """Whether the sizes of keys and values are multiples of what the tiles of AMX take."""
        sizes_fit = all(
            layer.key_size % PAIRED == layer.value_size % NUMBERS_AT_ONCE == 0
            for layer in self._shape.layers
        )
        return sizes_fit and self._cache.dtype == torch.bfloat16 and can_attend_with_amx()


def can_attend_with_amx() -> bool:
    """Whether the processor has AMX, and the system lets this process use it."""
    has_amx = HAS_AMX and has_amx_bf16(torch.device("cpu"), torch.bfloat16)
    return has_amx and bool(torch.cpu._init_amx())


def _fits_bf16_dot(layer: LayerShape, dtype: torch.dtype) -> bool:
    """Whether the processor's bfloat16 pair products support a layer's keys."""
    return HAS_AVX512_BF16 and dtype == torch.bfloat16 and layer.key_size % NUM_PAIRED == 0


@torch.inference_mode()
def max_attended_rows(shape: KVShape, dtype: torch.dtype) -> int:
    """Up to how many rows of one sequence the kernel attends: all if it is as fast as PyTorch's on
    this machine for a chunk of a prompt, measured with the first layer."""
    tried = shape.layers[0]
    kinds = KVShape(tuple(dict.fromkeys(shape.layers)))  # they decide whether tiles are used
    num_keys = 2 * _TRIED_ROWS
    cache = KVCache(kinds, num_keys, dtype, torch.device("cpu"))
    if not CpuTreeAttention.can_read(cache):
        return _MIN_ROWS
    kernel = CpuTreeAttention(cache, Workers())
    if kernel.uses_amx:
        return UNLIMITED
    keys, values = cache.read(0, 0, num_keys)
    query = keys.new_zeros((1, tried.num_heads, _TRIED_ROWS, tried.key_size))
    mask = query.new_zeros((_TRIED_ROWS, num_keys))
    chunk = Chunk(Segment(0, num_keys), num_keys - _TRIED_ROWS, [0] * _TRIED_ROWS, None)
    columns = list_columns(PlacedChunks.of([(0, chunk)]), _TRIED_ROWS)

    def ours(_count: int) -> object:
        return kernel(0, query, columns, 1.0, None, None)

    def theirs(_count: int) -> object:
        return F.scaled_dot_product_attention(query, keys, values, mask)

    return UNLIMITED if max_rows_faster((_TRIED_ROWS,), ours, theirs) else _MIN_ROWS


def _addresses(cache: KVCache, layer: int) -> list[int]:
    """The addresses of keys and values, and their sizes; the cache never moves."""
    keys, values = (stored[0] for stored in cache.read_all(layer))
    sizes = (*keys.shape, values.shape[2])
    return [keys.data_ptr(), values.data_ptr(), *sizes]
