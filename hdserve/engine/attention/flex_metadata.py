"""What the rows of a forward see, as :mod:`~hdserve.engine.attention.flex` reads it."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from hdserve.engine.batch.cpu_gpu_buffer import CpuGpuBuffer
from hdserve.engine.batch.input_buffers import ALIGNMENT
from hdserve.engine.batch.packed_rows import PackedRows
from hdserve.engine.kernels.rows import (
    ANCESTORS,
    POSITION,
    START,
    WORD_BITS,
    describe_rows,
    list_blocks,
)
from hdserve.engine.kv_cache.cache import STORED_ALIGNMENT, KVCache
from hdserve.engine.kv_cache.segments import align

KEYS_PER_BLOCK: Final = STORED_ALIGNMENT
"""Rows of the cache that attention reads or skips together."""

ROWS_PER_BLOCK: Final = 128
"""Rows of a forward for which attention reads the same blocks."""


class FlexAttentionMetadata:
    """What rows see, filled for each step and sent to the device; its addresses never change.

    Args:
        num_rows: of the forwards, padding included.
        max_draft_tokens: most drafted tokens of a sequence, at least one.

    Attributes:
        positions: ``[num_rows]``.
        starts, stops: ``[num_rows]``: a row sees the committed cache rows ``start ... stop-1``, and
            drafts as below.
        first_nodes, num_nodes: ``[num_rows]``: where in the cache the drafts of its sequence begin,
            and how many there are; not used for rows that are no drafts.
        first_node_rows: ``[num_rows]``: the row of the first of these drafts.
        ancestors: ``[num_words, num_rows]``: bit ``i % 31`` of word ``i // 31`` says whether the
            ``i``-th of these drafts is the row itself or an ancestor of it.
        num_blocks: ``[1, 1, num_parts]``: for each group of ``ROWS_PER_BLOCK`` rows, how many
            blocks of keys any of them sees.
        blocks: ``[1, 1, num_parts, all blocks of the cache]``: which ones.

        All of them are int32, to save registers of the attention kernel.
    """

    def __init__(self, cache: KVCache, num_rows: int, max_draft_tokens: int) -> None:
        self.num_rows = num_rows
        num_words = -(-max_draft_tokens // WORD_BITS)
        num_parts = -(-num_rows // ROWS_PER_BLOCK)
        num_cache_blocks = cache.num_stored_rows // KEYS_PER_BLOCK
        width = align(num_rows, ALIGNMENT)
        self._seen = CpuGpuBuffer((ANCESTORS + num_words, width), torch.int32, cache.device)
        self._num_blocks = CpuGpuBuffer((num_parts,), torch.int32, cache.device)
        self._blocks = CpuGpuBuffer((num_parts, num_cache_blocks), torch.int32, cache.device)
        self._marks = np.zeros(num_cache_blocks, np.bool_)
        seen = self._seen.device[:, :num_rows]
        self.positions, self.starts, self.stops = seen[:3]
        self.first_nodes, self.num_nodes, self.first_node_rows = seen[3:ANCESTORS]
        self.ancestors = seen[ANCESTORS:]
        self.num_blocks = self._num_blocks.device[None, None]
        self.blocks = self._blocks.device[None, None]

    def fill(self, packed: PackedRows) -> None:
        """Describe a step; call it when the device has finished the previous one.

        Padding rows see nothing.
        """
        self._seen.host[POSITION, : self.num_rows] = packed.position_ids
        self._seen.host[START:] = 0
        chunks = packed.chunks
        describe_rows(chunks.numbers, chunks.parents, self._seen.host)
        list_blocks(
            chunks.numbers,
            ROWS_PER_BLOCK,
            KEYS_PER_BLOCK,
            self._num_blocks.host,
            self._blocks.host,
            self._marks,
        )

    def send(self) -> None:
        """See :meth:`CpuGpuBuffer.send`."""
        for buffer in (self._seen, self._num_blocks, self._blocks):
            buffer.send()
