"""Attention over packed draft trees by PyTorch's FlexAttention, in the form a GPU needs.

All rows of a step attend in one call, whatever sequences they belong to, to the cache in place: a
list of the blocks of keys that any row sees says what is read, and a function of row and key says
what is visible.  Shapes depend only on the number of rows, and everything that changes from step to
step is read from tensors, so that a CUDA graph can hold it (docs/adr/0024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from hdserve.engine.attention.flex_metadata import (
    KEYS_PER_BLOCK,
    ROWS_PER_BLOCK,
    FlexAttentionMetadata,
)
from hdserve.engine.kernels.rows import WORD_BITS

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreFunction = Callable[..., torch.Tensor]

_SMALLEST_TILE: Final = 16


class BlockAttention:
    """Attends for all rows of a step.

    Args:
        seen: what the rows see; read when a step is run.
        num_keys: rows of the cache, a multiple of ``KEYS_PER_BLOCK``.
        is_compiled: ``False`` computes FlexAttention's reference definition, which a CPU can run.
    """

    def __init__(self, seen: FlexAttentionMetadata, num_keys: int, *, is_compiled: bool) -> None:
        self._seen = seen
        self._num_keys = num_keys
        self._attend: Any = flex_attention
        if is_compiled:
            self._attend = cast("Any", torch.compile)(
                flex_attention,
                dynamic=False,
                isolate_recompiles=True,
                options={"compile_threads": 1},  # no process pool next to the replica
            )
        self._masks: dict[int | None, BlockMask] = {}
        self._scores: dict[float, ScoreFunction] = {}

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with ``query [1, num_heads, num_rows, key_size]`` to the whole cache of a layer,
        ``keys [1, num_kv_heads, num_keys, key_size]`` and ``values`` alike.

        Args:
            sinks: ``[num_heads]``, see :func:`~hdserve.engine.attention.packed.packed_attention`.

        Returns:
            ``[1, num_rows, num_heads, value_size]``; zeros in rows that see nothing.
        """
        num_groups = query.shape[1] // keys.shape[1]
        found = self._attend(
            query,
            keys,
            values,
            score_mod=None if softcap is None else self._score(softcap),
            block_mask=self._mask(window),
            scale=scale,
            enable_gqa=num_groups > 1,
            kernel_options=_kernel_options(query.shape[2], num_groups),
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is not None:
            found = _beside(sinks, *found)
        return cast("torch.Tensor", found).transpose(1, 2).contiguous()

    def _mask(self, window: int | None) -> BlockMask:
        found = self._masks.get(window)
        if found is None:
            seen = self._seen
            found = self._masks[window] = BlockMask.from_kv_blocks(
                seen.num_blocks,
                seen.blocks,
                BLOCK_SIZE=(ROWS_PER_BLOCK, KEYS_PER_BLOCK),
                mask_mod=visible_in(seen, window),
                seq_lengths=(seen.num_rows, self._num_keys),
                compute_q_blocks=False,
            )
        return found

    def _score(self, softcap: float) -> ScoreFunction:
        found = self._scores.get(softcap)
        if found is None:

            def score(found: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                return torch.tanh(found / softcap) * softcap

            found = self._scores[softcap] = score
        return found


def _beside(sinks: torch.Tensor, attended: torch.Tensor, aux: Any) -> torch.Tensor:
    """``attended [1, num_heads, num_rows, value_size]``, the sum of whose exponentiated scores is
    ``exp(aux.lse)``, scaled down by the share that ``sinks`` take."""
    shares = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[None, :, None])
    return attended * shares[..., None].to(attended.dtype)


def _kernel_options(num_rows: int, num_groups: int) -> Any:
    """For few rows, put all heads that share keys in one tile.  By default such a tile gets two
    warps, however large it is, and spills registers: at 64 rows of 128 numbers on Hopper 24,232
    bytes with a window and 696 without; with eight warps 176 and none."""
    if num_rows >= ROWS_PER_BLOCK:
        return None
    together = 1 << (num_rows * num_groups - 1).bit_length()
    smallest = max(_SMALLEST_TILE, 1 << (num_groups - 1).bit_length())
    tile = max(smallest, min(together, ROWS_PER_BLOCK // 2))
    return {"BLOCK_M": tile, "num_warps": 4 if tile < ROWS_PER_BLOCK // 2 else 8}


def visible_in(seen: FlexAttentionMetadata, window: int | None) -> MaskFunction:
    """Whether a row sees a row of the cache: the committed tokens of its sequence, and those drafts
    under verification that are its ancestors, itself included; within a window of positions.
    """
    positions, starts, stops = seen.positions, seen.starts, seen.stops
    first_nodes, num_nodes = seen.first_nodes, seen.num_nodes
    first_node_rows, ancestors = seen.first_node_rows, seen.ancestors

    def is_visible(
        _batch: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        node: torch.Tensor = key - first_nodes[row]
        is_node = (node >= 0) & (node < num_nodes[row])
        node = torch.where(is_node, node, 0)
        bits = ancestors[node // WORD_BITS, row] >> (node % WORD_BITS)
        is_ancestor = is_node & (bits % 2 != 0)
        is_committed = (key >= starts[row]) & (key < stops[row])
        if window is None:
            return torch.logical_or(is_committed, is_ancestor)
        among_nodes = positions[first_node_rows[row] + node]
        position = torch.where(is_node, among_nodes, key - starts[row])
        is_near = positions[row] - position < window
        return torch.logical_and(is_committed | is_ancestor, is_near)

    return is_visible
