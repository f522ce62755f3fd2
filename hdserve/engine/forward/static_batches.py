"""Forwards of a few fixed numbers of rows, whose inputs stay at the same addresses, for GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from hdserve.engine import gpu_kernels
from hdserve.engine.attention.cpu_tree import UNLIMITED
from hdserve.engine.attention.flex import BlockAttention
from hdserve.engine.attention.flex_metadata import FlexAttentionMetadata
from hdserve.engine.attention.gpu_tree_metadata import TreeAttentionMetadata
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import BatchDescriptor, ForwardBatch
from hdserve.engine.batch.input_buffers import InputBuffers
from hdserve.engine.batch.packed_rows import PackedRows, pack_rows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_plan import AttendAll, MultiplyRows, StepPlan
from hdserve.engine.forward.cuda_graphs import MAX_GRAPH_LOGITS
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.rows import WORD_BITS
from hdserve.engine.kernels.splits import MAX_DEPTH, MAX_ROWS
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import align

if TYPE_CHECKING:
    from hdserve.engine.gpu_kernels.attend import GpuTreeAttention

CAPTURE_SHAPES: Final = Shapes(row_counts=tuple(1 << power for power in range(18)))
"""Row counts are powers of two: a GPU reads the weights in the same time for one row and for a
hundred."""

_MAX_CAPTURED_ROWS: Final = 1024
"""The most rows of a batch that has a kind; larger batches are rare."""

_LOGIT_COUNTS: Final = (1, 32, MAX_GRAPH_LOGITS)
"""The allowed numbers of rows with logits in batches that hold more than tree nodes; in batches
with fewer rows than that, all rows get logits."""


class _StaticInputs(NamedTuple):
    """What batches of the same number of rows share."""

    buffers: InputBuffers
    metadata: FlexAttentionMetadata | TreeAttentionMetadata
    plan: StepPlan

    def send(self) -> None:
        """Send the contents of the batch to the device."""
        self.buffers.send()
        self.metadata.send()


class StaticBatches:
    """Makes batches whose rows attend in one call: by our kernel if all rows are nodes of trees and
    the GPU runs it, else by :class:`~hdserve.engine.attention.flex.BlockAttention`.

    Args:
        max_draft_tokens: most drafted tokens of a sequence; 0 still leaves room for some.
        num_heads: of queries.

    Attributes:
        max_depth: of drafts, up to which our kernel can attend.
    """

    def __init__(
        self, cache: KVCache, max_draft_tokens: int, workers: Workers, *, num_heads: int
    ) -> None:
        self._multiply_rows: MultiplyRows | None = None
        self._tree_attention: GpuTreeAttention | None = None
        if gpu_kernels.are_available(cache.device):
            from hdserve.engine.gpu_kernels.attend import GpuTreeAttention
            from hdserve.engine.gpu_kernels.multiply import RowProducts

            if RowProducts.are_fast_on(cache.device):
                self._multiply_rows = RowProducts(cache.device)
            sizes = [
                each for layer in cache.shape.layers for each in (layer.key_size, layer.value_size)
            ]
            if GpuTreeAttention.can_attend(cache.dtype, sizes):
                self._tree_attention = GpuTreeAttention(cache.device)
        self.max_depth = UNLIMITED if self._tree_attention is None else MAX_DEPTH
        self._cache = cache
        fewest = min(layer.num_heads for layer in cache.shape.layers)
        self._num_groups = max(1, num_heads // fewest)
        self._max_draft_tokens = align(max(1, max_draft_tokens), WORD_BITS)
        self._workers = workers
        self._inputs: dict[tuple[int, bool], _StaticInputs] = {}

    @property
    def has_tree_kernel(self) -> bool:
        """Whether our kernel attends where it can."""
        return self._tree_attention is not None

    def disable_tree_kernel(self) -> None:
        """Use ``BlockAttention`` for all batches from now on."""
        self._tree_attention = None

    @property
    def has_row_products(self) -> bool:
        """Whether our kernel multiplies few rows."""
        return self._multiply_rows is not None

    def disable_row_products(self) -> None:
        """Leave all products to PyTorch from now on."""
        self._multiply_rows = None
        self._inputs.clear()  # their plans have the kernel

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether all trees of ``chunks`` are small enough."""
        return all(
            chunk.tree is None or chunk.tree.num_draft_tokens <= self._max_draft_tokens
            for chunk in chunks
        )

    def build(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        """Pack ``chunks``, which must fit, into one forward.

        Overwrites the previous batch with the same number of rows.
        """
        packed = pack_rows(chunks, CAPTURE_SHAPES, self._cache.scratch_row)
        return self._build(packed, _num_logits(packed), by_splits=self._takes_splits(packed))

    def empty(self, num_rows: int) -> Iterator[ForwardBatch]:
        """Batches of ``num_rows`` rows of padding, one of each kind that :meth:`build` makes."""
        packed = pack_rows([], Shapes(row_counts=(num_rows,)), self._cache.scratch_row)
        by_splits = self._takes_splits(packed)
        if by_splits:
            yield self._build(packed, num_rows, by_splits=True)
        for number in _logit_counts(num_rows):
            yield self._build(packed, number, by_splits=False)

    def _takes_splits(self, packed: PackedRows) -> bool:
        return (
            self._tree_attention is not None
            and packed.are_all_nodes
            and packed.num_rows <= MAX_ROWS
            and packed.chunks.depths.max(initial=0) <= MAX_DEPTH
        )

    def _build(self, packed: PackedRows, num_logits: int, *, by_splits: bool) -> ForwardBatch:
        num_rows = packed.num_rows
        inputs = self._inputs_for(num_rows, by_splits=by_splits)
        buffers = inputs.buffers
        buffers.fill(packed)
        inputs.metadata.fill(packed)
        is_captured = num_rows <= _MAX_CAPTURED_ROWS and num_logits <= MAX_GRAPH_LOGITS
        return ForwardBatch(
            token_ids=buffers.token_ids,
            position_ids=buffers.position_ids,
            logit_rows=buffers.logit_rows[:num_logits],
            packed=packed,
            plan=inputs.plan,
            send=inputs.send,
            races=buffers.races[:, :num_logits],
            kind=BatchDescriptor(num_rows, num_logits, by_splits) if is_captured else None,
        )

    def _inputs_for(self, num_rows: int, *, by_splits: bool) -> _StaticInputs:
        found = self._inputs.get((num_rows, by_splits))
        if found is None:
            cache = self._cache
            buffers = InputBuffers(cache, num_rows)
            metadata, attend = self._attention(num_rows, by_splits=by_splits)
            plan = StepPlan(
                cache,
                buffers.kv_rows,
                self._workers,
                attend_all=attend,
                multiply_rows=self._multiply_rows,
            )
            found = self._inputs[num_rows, by_splits] = _StaticInputs(buffers, metadata, plan)
        return found

    def _attention(
        self, num_rows: int, *, by_splits: bool
    ) -> tuple[FlexAttentionMetadata | TreeAttentionMetadata, AttendAll]:
        cache = self._cache
        if by_splits:
            assert self._tree_attention is not None, "only our kernel reads parts"
            metadata = TreeAttentionMetadata(num_rows, self._num_groups, cache.device)
            layout = metadata.rows, metadata.items, metadata.rows_per_tile
            return metadata, partial(self._tree_attention, *layout)
        flex_metadata = FlexAttentionMetadata(cache, num_rows, self._max_draft_tokens)
        number, is_gpu = cache.num_stored_rows, cache.device.type == "cuda"
        return flex_metadata, BlockAttention(flex_metadata, number, is_compiled=is_gpu)


def _logit_counts(num_rows: int) -> list[int]:
    """The allowed numbers of rows with logits among ``num_rows`` rows that are not all nodes: few,
    since each is compiled for, and none that is large."""
    if num_rows > _MAX_CAPTURED_ROWS:
        return [1]
    return [*(count for count in _LOGIT_COUNTS if count < num_rows), num_rows][: len(_LOGIT_COUNTS)]


def _num_logits(packed: PackedRows) -> int:
    """The number of rows with logits, rounded up to an allowed one."""
    if packed.are_all_nodes:
        return packed.num_rows
    needed = len(packed.logit_rows)
    return next((count for count in _logit_counts(packed.num_rows) if needed <= count), needed)
