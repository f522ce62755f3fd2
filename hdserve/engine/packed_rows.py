"""The chunks of a step one after the other, as rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdserve.engine.chunk import Chunk
from hdserve.engine.shapes import Shapes

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What each row of a forward is.

    Attributes:
        token_ids, position_ids: ``[num_rows]``.
        kv_rows: ``[num_rows]``: the cache row each row is written to.
        logit_rows, logit_slices, num_nodes, scored_slices: see
            :class:`~hdserve.engine.batch.ForwardBatch`.
        placed: every chunk with its first row, ascending.
    """

    token_ids: IntArray
    position_ids: IntArray
    kv_rows: IntArray
    logit_rows: list[int]
    logit_slices: list[slice]
    num_nodes: int
    scored_slices: dict[int, slice]
    placed: list[tuple[int, Chunk]]

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return len(self.token_ids)

    @property
    def are_all_nodes(self) -> bool:
        """Whether all rows but padding are nodes of trees, so that the ``n``-th row with logits is
        the ``n``-th row."""
        return not self.scored_slices and all(
            chunk.tree is not None and len(chunk.token_ids) == 1 for _, chunk in self.placed
        )


def pack_rows(chunks: Sequence[Chunk], shapes: Shapes, scratch_row: int) -> PackedRows:
    """Put the rows of ``chunks`` one after the other, as many as ``shapes`` allow.

    Padding rows repeat token 0 at position 0, write to the scratch row and are read by nothing.
    """
    num_rows = shapes.pad_rows(sum(chunk.num_rows for chunk in chunks))
    token_ids = np.zeros(num_rows, np.int64)
    position_ids = np.zeros(num_rows, np.int64)
    kv_rows = np.full(num_rows, scratch_row, np.int64)
    logit_rows: list[int] = []
    logit_slices: list[slice] = []
    placed: list[tuple[int, Chunk]] = []
    row = 0
    for chunk in chunks:
        rows = slice(row, row + chunk.num_rows)
        token_ids[rows] = [*chunk.token_ids, *(chunk.tree.token_ids[1:] if chunk.tree else ())]
        position_ids[rows] = positions(chunk)
        first_kv_row = chunk.segment.start + chunk.first_column
        kv_rows[rows] = np.arange(first_kv_row, first_kv_row + chunk.num_rows)
        placed.append((row, chunk))
        first_logit = len(logit_rows)
        if chunk.tree is not None:
            logit_rows.extend(range(row + len(chunk.token_ids) - 1, rows.stop))
        logit_slices.append(slice(first_logit, len(logit_rows)))
        row = rows.stop
    num_nodes = len(logit_rows)
    scored = _append_scored(logit_rows, placed)
    if logit_rows:  # the head is a linear layer like the others
        logit_rows += [0] * (shapes.pad_rows(len(logit_rows)) - len(logit_rows))
    return PackedRows(
        token_ids, position_ids, kv_rows, logit_rows, logit_slices, num_nodes, scored, placed
    )


def _append_scored(logit_rows: list[int], placed: Sequence[tuple[int, Chunk]]) -> dict[int, slice]:
    """Append the rows of scored tokens; which are those of each chunk that has some."""
    slices = {}
    for index, (row, chunk) in enumerate(placed):
        if chunk.num_scored_tokens:
            first = len(logit_rows)
            logit_rows.extend(range(row, row + chunk.num_scored_tokens))
            slices[index] = slice(first, len(logit_rows))
    return slices


def positions(chunk: Chunk) -> IntArray:
    """Of each row of ``chunk`` in its text, ``[num_rows]``; siblings have the same."""
    last = chunk.first_column + len(chunk.token_ids) - 1
    chain = np.arange(chunk.first_column, last + 1, dtype=np.int64)
    if chunk.tree is None or not chunk.tree.num_draft_tokens:
        return chain
    return np.concatenate([chain, last + np.array(chunk.tree.depths[1:], np.int64)])
