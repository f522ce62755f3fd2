"""The chunks of a forward, each with its first row, and the same as flat arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.kernels.rows import NUM_CHUNK_FIELDS

IntArray = npt.NDArray[np.int64]


class PlacedChunks(NamedTuple):
    """Chunks in the order of their rows, for compiled code.

    Attributes:
        placed: every chunk with its first row, ascending.
        numbers: ``[num_chunks, NUM_CHUNK_FIELDS]``, see :mod:`hdserve.engine.kernels.rows`.
        parents, depths: ``[num_drafts]``, of the drafted nodes of all trees; a parent is a node of
            its own tree, 0 the root.
        num_ancestors: of all drafts together, below the roots, each draft itself included.
    """

    placed: list[tuple[int, Chunk]]
    numbers: IntArray
    parents: IntArray
    depths: IntArray
    num_ancestors: int

    @classmethod
    def of(cls, placed: Iterable[tuple[int, Chunk]]) -> PlacedChunks:
        placed = [*placed]
        numbers: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for row, chunk in placed:
            tree, num_decided = chunk.tree, len(chunk.token_ids)
            num_drafts = 0 if tree is None else tree.num_draft_tokens
            where = (chunk.first_column, chunk.segment.start, tree is not None, len(parents))
            numbers += (row, num_decided, num_decided + num_drafts, *where)
            if tree is not None and num_drafts:
                parents += tree.parents[1:]
                depths += tree.depths[1:]
        first_parent, first_depth = len(numbers), len(numbers) + len(parents)
        found = np.array(numbers + parents + depths, np.int64)
        return cls(
            placed,
            found[:first_parent].reshape(-1, NUM_CHUNK_FIELDS),
            found[first_parent:first_depth],
            found[first_depth:],
            sum(depths),
        )
