"""Forwards of a few numbers of rows, whose input lies in the same place every time, for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hdserve.engine import gpu_kernels
from hdserve.engine.batch import ForwardBatch, MultiplyRows, StepPlan
from hdserve.engine.block_attention import BlockAttention
from hdserve.engine.chunk import Chunk
from hdserve.engine.kernels.rows import WORD_BITS
from hdserve.engine.kv_cache import KVCache, align
from hdserve.engine.packed_rows import pack_rows
from hdserve.engine.row_buffers import RowBuffers
from hdserve.engine.shapes import Shapes
from hdserve.engine.workers import Workers

FIXED_SHAPES: Final = Shapes(row_counts=tuple(1 << power for power in range(18)))
"""A GPU reads the weights for one row or for a hundred in the same time."""


class FixedBatches:
    """Makes batches whose rows attend by :class:`~hdserve.engine.block_attention.BlockAttention`.

    Args:
        max_draft_tokens: most drafted tokens of a sequence; there is room for some, whatever it is.
        is_compiled: whether attention is, as on a GPU.
    """

    def __init__(
        self, cache: KVCache, max_draft_tokens: int, workers: Workers, *, is_compiled: bool
    ) -> None:
        self._multiply_rows: MultiplyRows | None = None
        if gpu_kernels.are_available(cache.device):
            from hdserve.engine.gpu_kernels.multiply import RowProducts

            if RowProducts.are_fast_on(cache.device):
                self._multiply_rows = RowProducts(cache.device)
        self._cache = cache
        self._max_draft_tokens = align(max(1, max_draft_tokens), WORD_BITS)
        self._workers = workers
        self._is_compiled = is_compiled
        self._made: dict[int, tuple[RowBuffers, StepPlan]] = {}

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the trees of ``chunks`` are not too large."""
        return all(
            chunk.tree is None or chunk.tree.num_draft_tokens <= self._max_draft_tokens
            for chunk in chunks
        )

    def build(self, chunks: Sequence[Chunk], shapes: Shapes = FIXED_SHAPES) -> ForwardBatch:
        """Pack ``chunks``, which fit, into one forward; none make one of padding alone.

        The batch before it of as many rows is another one then.
        """
        packed = pack_rows(chunks, shapes, self._cache.scratch_row)
        buffers, plan = self._of(packed.num_rows)
        buffers.fill(packed)
        num_logits = packed.num_rows if packed.are_all_nodes else len(packed.logit_rows)
        return ForwardBatch(
            token_ids=buffers.token_ids,
            position_ids=buffers.position_ids,
            logit_rows=buffers.logit_rows[:num_logits],
            logit_slices=packed.logit_slices,
            num_nodes=packed.num_nodes,
            scored_slices=packed.scored_slices,
            plan=plan,
            is_fixed=packed.are_all_nodes,
        )

    def _of(self, num_rows: int) -> tuple[RowBuffers, StepPlan]:
        found = self._made.get(num_rows)
        if found is None:
            cache = self._cache
            buffers = RowBuffers(cache, num_rows, self._max_draft_tokens)
            attention = BlockAttention(
                buffers, cache.num_stored_rows, is_compiled=self._is_compiled
            )
            plan = StepPlan(
                cache,
                buffers.kv_rows,
                None,
                [],
                False,
                self._workers,
                by_blocks=attention,
                multiply_rows=self._multiply_rows,
            )
            found = self._made[num_rows] = buffers, plan
        return found
