"""Which columns of its sequence each row of a step sees, as the compiled attention reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hdserve.databases.cache_lines import address_of
from hdserve.engine.chunk import Chunk
from hdserve.tree import DraftTree

IntArray = npt.NDArray[np.int64]

_NOTHING = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class VisibleColumns:
    """Per row a list of columns in the order of their positions, in three flat arrays.

    A row sees the columns ``0 ... prefix-1`` and then ``tails[first_tail : first_tail + visible -
    prefix]``: its ancestors in the draft tree and itself.

    Attributes:
        spans: ``[num_sequences, 3]``: first row, number of rows, first row in the cache.
        rows: ``[num_rows, 3]``: prefix, first tail, visible; zeros for rows of no span here.
        tails: columns.
        most_visible: columns the row that sees most of them sees.
        num_visible: columns all rows see together.
        num_shared: columns that the rows of a sequence share, of all sequences together.
        addresses: of spans, rows and tails, each with its length, as the kernel takes them.
    """

    spans: IntArray
    rows: IntArray
    tails: IntArray
    most_visible: int
    num_visible: int
    num_shared: int
    addresses: IntArray = field(init=False)

    def __post_init__(self) -> None:
        arrays = (self.spans, self.rows, self.tails)
        found = [number for array in arrays for number in (address_of(array), len(array))]
        object.__setattr__(self, "addresses", np.array(found, np.int64))


def list_columns(placed: Iterable[tuple[int, Chunk]], num_rows: int) -> VisibleColumns:
    """List what the rows of chunks see; each chunk comes with its first row of ``num_rows``, in
    ascending order."""
    spans: list[tuple[int, int, int]] = []
    rows: list[tuple[int, int, int]] = []
    tails: list[int] = []
    num_shared = 0
    for first_row, chunk in placed:
        rows += [_NOTHING] * (first_row - len(rows))
        spans.append((first_row, chunk.num_rows, chunk.segment.start))
        first = chunk.first_column + 1
        num_shared += first
        rows += [(column, 0, column) for column in range(first, first + len(chunk.token_ids))]
        if chunk.tree is not None and chunk.tree.num_draft_tokens:
            _list_drafts(chunk.tree, chunk.first_column + len(chunk.token_ids), rows, tails)
    visible = [row[2] for row in rows]
    rows += [_NOTHING] * (num_rows - len(rows))
    return VisibleColumns(
        np.array(spans, np.int64),
        np.array(rows, np.int64),
        np.array(tails or [0], np.int64),
        most_visible=max(visible, default=0),
        num_visible=sum(visible),
        num_shared=num_shared,
    )


def _list_drafts(
    tree: DraftTree, prefix: int, rows: list[tuple[int, int, int]], tails: list[int]
) -> None:
    """Append what the nodes below the root see, of which all see ``prefix`` columns."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents[1:], start=1):
        path = [*paths[parent], prefix - 1 + node]
        rows.append((prefix, len(tails), prefix + len(path)))
        tails += path
        paths.append(path)
