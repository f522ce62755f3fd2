"""Which columns of its sequence each row of a step sees, as the compiled attention reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hdserve.engine.chunk import Chunk

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VisibleColumns:
    """Per row a list of columns in the order of their positions, in three flat arrays.

    A row sees the columns ``0 ... prefix-1`` and then ``tails[first_tail : first_tail + visible -
    prefix]``: its ancestors in the draft tree and itself.

    Attributes:
        spans: ``[num_sequences, 3]``: first row, number of rows, first row in the cache.
        rows: ``[num_rows, 3]``: prefix, first tail, visible; zeros for rows of no span here.
        tails: columns.
    """

    spans: IntArray
    rows: IntArray
    tails: IntArray

    @property
    def most_visible(self) -> int:
        """Columns the row that sees most of them sees."""
        return int(self.rows[:, 2].max())

    @property
    def num_visible(self) -> int:
        """Columns all rows see together."""
        return int(self.rows[:, 2].sum())


def list_columns(placed: Iterable[tuple[int, Chunk]], num_rows: int) -> VisibleColumns:
    """List what the rows of chunks see; each chunk comes with its first row of ``num_rows``."""
    spans: list[tuple[int, int, int]] = []
    tails: list[int] = []
    rows = np.zeros((num_rows, 3), np.int64)
    for first_row, chunk in placed:
        spans.append((first_row, chunk.num_rows, chunk.segment.start))
        num_decided = len(chunk.token_ids)
        decided = rows[first_row : first_row + num_decided]
        decided[:, 0] = decided[:, 2] = chunk.first_column + np.arange(1, num_decided + 1)
        if chunk.tree is None:
            continue
        prefix = chunk.first_column + num_decided
        paths: list[list[int]] = [[]]
        for node in range(1, len(chunk.tree)):
            path = [*paths[chunk.tree.parents[node]], prefix - 1 + node]
            rows[first_row + num_decided - 1 + node] = prefix, len(tails), prefix + len(path)
            tails += path
            paths.append(path)
    return VisibleColumns(np.array(spans, np.int64), rows, np.array(tails or [0], np.int64))
