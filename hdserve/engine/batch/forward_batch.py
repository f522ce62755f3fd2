"""One step's work as flat arrays: which rows go through the model, and what each may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.packed_rows import PackedRows, pack_rows
from hdserve.engine.batch.placed_chunks import PlacedChunks
from hdserve.engine.batch.races import races_on
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_plan import AttendListed, Listed, Span, StepPlan
from hdserve.engine.batch.visible_columns import list_columns
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.cache import KVCache


def _nothing_to_send() -> None:
    """Do nothing: the batch was built on the device."""


class BatchDescriptor(NamedTuple):
    """Batches of one kind share their shape: the number of rows, the number of rows with logits,
    and the attention kernel."""

    num_rows: int
    num_logits: int
    by_splits: bool


class ForwardBatch(NamedTuple):
    """The input of one forward: ``token_ids`` and ``position_ids [num_rows]``, int64.

    Attributes:
        logit_rows: ``[n]`` int64, the rows that need logits.
        packed: what the rows are, and which of them belong to which chunk.
        send: copies the contents of these tensors to the device; the first thing a forward does,
            also when it runs as a CUDA graph.
        races: ``[2, n]`` of these rows, see :mod:`hdserve.engine.batch.races`; ``None`` where
            forwards draw nothing.
        kind: shared by all batches that reuse these same tensors; ``None`` if none do.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    packed: PackedRows
    plan: StepPlan
    send: Callable[[], None] = _nothing_to_send
    races: torch.Tensor | None = None
    kind: BatchDescriptor | None = None


def build_batch(
    chunks: Sequence[Chunk],
    cache: KVCache,
    shapes: Shapes,
    kernel: AttendListed | None,
    workers: Workers,
) -> ForwardBatch:
    """Pack ``chunks`` into one forward of an allowed shape.

    Args:
        kernel: attends for all sequences if shapes are exact, else only for sequences of at most
            ``kernel.max_rows`` rows, up to which it is fast.
    """
    device, packed = cache.device, pack_rows(chunks, shapes, cache.scratch_row)
    is_cpu = device.type == "cpu"
    arrays = packed.token_ids, packed.position_ids, packed.logit_rows, packed.kv_rows
    token_ids, position_ids, logit_rows, kv_rows = (
        torch.from_numpy(each) if is_cpu else torch.from_numpy(each).to(device) for each in arrays
    )
    return ForwardBatch(
        token_ids,
        position_ids,
        logit_rows,
        packed,
        plan=_plan(packed, cache, kv_rows, shapes, kernel, workers),
        races=None if is_cpu else races_on(device, len(packed.logit_rows), packed.races),
    )


def _plan(
    packed: PackedRows,
    cache: KVCache,
    kv_rows: torch.Tensor,
    shapes: Shapes,
    kernel: AttendListed | None,
    workers: Workers,
) -> StepPlan:
    most = 0 if kernel is None else len(kv_rows) if shapes.is_exact else kernel.max_rows
    chunks, spans = packed.chunks, list[Span]()
    if any(chunk.num_rows > most for _, chunk in chunks.placed):
        spans = [Span(row, chunk) for row, chunk in chunks.placed if chunk.num_rows > most]
        few = [(row, chunk) for row, chunk in chunks.placed if chunk.num_rows <= most]
        chunks = PlacedChunks.of(few)
    listed = None
    if kernel is not None and chunks.placed:
        listed = Listed(kernel, list_columns(chunks, len(kv_rows)))
    return StepPlan(cache, kv_rows, workers, listed, spans, shapes.is_exact)
