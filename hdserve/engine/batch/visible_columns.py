"""Which columns of its sequence each row of a step sees, as the compiled attention reads it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdserve.databases.cache_lines import address_of
from hdserve.engine.batch.placed_chunks import IntArray, PlacedChunks
from hdserve.engine.kernels.attention_call import QUERIES_PER_TILE
from hdserve.engine.kernels.rows import list_visible

MOST_SPAN_ROWS = QUERIES_PER_TILE
"""Rows of a chunk of a prompt that are attended for by one thread: whole tiles of queries, however
many heads share their keys."""


class VisibleColumns(NamedTuple):
    """Per row a list of columns in the order of their positions, in three flat arrays.

    A row sees the columns ``0 ... prefix-1`` and then ``tails[first_tail : first_tail + visible -
    prefix]``: its ancestors in the draft tree and itself.

    Attributes:
        spans: ``[num_spans, 3]``: first row, number of rows, at most :data:`MOST_SPAN_ROWS`, first
            row of the sequence in the cache.
        rows: ``[num_rows, 3]``: prefix, first tail, visible; zeros for rows of other spans.
        tails: columns.
        most_visible: number of columns seen by the row that sees most.
        num_visible: number of columns all rows see, in total.
        num_shared: number of columns the rows of a sequence share, over all sequences.
        addresses: of spans, rows and tails, each with its length, as the kernel takes them.
    """

    spans: IntArray
    rows: IntArray
    tails: IntArray
    most_visible: int
    num_visible: int
    num_shared: int
    addresses: IntArray


def list_columns(chunks: PlacedChunks, num_rows: int) -> VisibleColumns:
    """List what the rows of ``chunks`` see; they are some of ``num_rows`` rows."""
    spans = np.empty((len(chunks.placed), 3), np.int64)
    rows = np.zeros((num_rows, 3), np.int64)
    tails = np.empty(max(1, chunks.num_ancestors), np.int64)
    addresses, totals = np.empty(6, np.int64), np.zeros(3, np.int64)
    list_visible(chunks.numbers, chunks.parents, spans, rows, tails, addresses, totals)
    if num_rows > MOST_SPAN_ROWS and spans[:, 1].max(initial=0) > MOST_SPAN_ROWS:
        spans = _cut(spans)
        addresses[0], addresses[1] = address_of(spans), len(spans)
    most_visible, num_visible, num_shared = totals.tolist()
    return VisibleColumns(spans, rows, tails, most_visible, num_visible, num_shared, addresses)


def _cut(spans: IntArray) -> IntArray:
    """Cut spans of more than :data:`MOST_SPAN_ROWS` rows."""
    found = [
        (first, min(MOST_SPAN_ROWS, start + num_rows - first), first_key)
        for start, num_rows, first_key in spans.tolist()
        for first in range(start, start + num_rows, MOST_SPAN_ROWS)
    ]
    return np.array(found, np.int64)
