"""The chunks of a step one after the other, as rows of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.placed_chunks import IntArray, PlacedChunks
from hdserve.engine.batch.races import RacesOfRows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.kernels.rows import lay_out_rows


class PackedRows(NamedTuple):
    """What each row of a forward is.

    Attributes:
        token_ids, position_ids: ``[num_rows]``; siblings have the same position.
        kv_rows: ``[num_rows]``: the cache row each row is written to.
        logit_rows: the rows that need logits: first the nodes of all trees, then the prompt tokens
            that are scored, then padding.
        logit_slices: for each chunk its part of ``logit_rows``, in the order of its tree's nodes;
            empty for a chunk without a tree.
        num_nodes: of all trees; the first ``num_nodes`` of ``logit_rows`` are theirs.
        scored_slices: for each chunk with scored tokens, by index, its part of ``logit_rows``.
    """

    token_ids: IntArray
    position_ids: IntArray
    kv_rows: IntArray
    logit_rows: IntArray
    logit_slices: list[slice]
    num_nodes: int
    scored_slices: dict[int, slice]
    chunks: PlacedChunks

    @property
    def num_rows(self) -> int:
        """The number of rows, padding included."""
        return len(self.token_ids)

    @property
    def are_all_nodes(self) -> bool:
        """Whether all rows except padding are tree nodes, so that the ``n``-th row with logits is
        the ``n``-th row."""
        return not self.scored_slices and all(
            chunk.tree is not None and len(chunk.token_ids) == 1 for _, chunk in self.chunks.placed
        )

    @property
    def races(self) -> RacesOfRows:
        """Of the rows with logits."""
        placed = zip(self.logit_slices, self.chunks.placed, strict=True)
        return [(rows, chunk.race) for rows, (_, chunk) in placed]


def pack_rows(chunks: Sequence[Chunk], shapes: Shapes, scratch_row: int) -> PackedRows:
    """Put the rows of ``chunks`` one after the other, padded to a number that ``shapes`` allow.

    Padding rows hold token 0 at position 0, write to the scratch row and are never read.
    """
    token_ids: list[int] = []
    placed: list[tuple[int, Chunk]] = []
    logit_slices: list[slice] = []
    num_nodes = 0
    for chunk in chunks:
        placed.append((len(token_ids), chunk))
        token_ids += chunk.token_ids
        first_node = num_nodes
        if chunk.tree is not None:
            token_ids += chunk.tree.token_ids[1:]
            num_nodes += len(chunk.tree)
        logit_slices.append(slice(first_node, num_nodes))
    num_rows = shapes.pad_rows(len(token_ids))
    token_ids += [0] * (num_rows - len(token_ids))
    position_ids, kv_rows = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    scored = _scored_rows(placed)
    num_logits = num_nodes + sum(map(len, scored.values()))
    if num_logits:  # the LM head is a linear layer like the others
        num_logits = shapes.pad_rows(num_logits)
    logit_rows = np.zeros(num_logits, np.int64)
    found = PlacedChunks.of(placed)
    lay_out_rows(found.numbers, found.depths, scratch_row, position_ids, kv_rows, logit_rows)
    return PackedRows(
        np.array(token_ids, np.int64),
        position_ids,
        kv_rows,
        logit_rows,
        logit_slices,
        num_nodes,
        _write_scored(scored, logit_rows, num_nodes),
        found,
    )


def _scored_rows(placed: Sequence[tuple[int, Chunk]]) -> dict[int, range]:
    """The rows of scored tokens, by the index of each chunk that has some."""
    return {
        index: range(row, row + chunk.num_scored_tokens)
        for index, (row, chunk) in enumerate(placed)
        if chunk.num_scored_tokens
    }


def _write_scored(scored: dict[int, range], logit_rows: IntArray, first: int) -> dict[int, slice]:
    """Write the rows of ``scored`` to ``logit_rows`` from ``first`` on; returns each chunk's
    part."""
    slices = {}
    for index, rows in scored.items():
        slices[index] = slice(first, first + len(rows))
        logit_rows[slices[index]] = rows
        first += len(rows)
    return slices
