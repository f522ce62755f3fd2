"""What the model itself expected next: the likeliest tokens after each verified context.

A verification computes the logits of every node of a draft tree, including the rejected ones.
Their likeliest tokens are stored under the last tokens before them and drafted when these occur
again ("Turning Trash into Treasure: Token Recycling", Luo et al. 2024, has a row per last token).

The rows are those of :mod:`hdserve.databases.ngram`; a count is a probability in units of
``1 / SHARE_UNITS``, and a context that is seen again is overwritten.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import fast_inlined
from hdserve.databases.namespace_tables import MIN_RESERVE_BYTES
from hdserve.databases.ngram import (
    BUCKET_ROWS,
    COUNT_SHIFT,
    FIRST_SLOT,
    MAX_COUNT,
    NUM_ADDED,
    ROW_WORDS,
    Ints,
    Rows,
    Tokens,
    claim_row,
    grow,
    set_total,
)
from hdserve.databases.ngram_table import NgramTable

RECYCLED_ORDERS = (1, 2, 3)
"""Context lengths in tokens, ascending."""

NUM_TOP = 8
"""Likeliest tokens kept per context."""

OBJECT_BYTES = 1 << 10
"""What the objects of a namespace take in addition to the rows."""

SHARE_UNITS = MAX_COUNT
_ZERO = np.uint32(0)


@fast_inlined
def write_top(
    rows: Rows,
    size: Ints,
    context_hash: np.uint64,
    tokens: Tokens,
    shares: npt.NDArray[np.float32],
    stamp: int,
) -> None:
    """Store ``tokens``, likeliest first, as what follows a context."""
    row = claim_row(rows, size, context_hash, stamp, 0)
    slot = FIRST_SLOT
    for index in range(NUM_TOP):
        count = np.int64(shares[index] * np.float32(SHARE_UNITS))
        if count > 0:
            word = np.uint32(tokens[index]) | (np.uint32(count) << COUNT_SHIFT)
            rows[row, slot] = word
            slot += 1
    for rest in range(slot, ROW_WORDS):
        rows[row, rest] = _ZERO
    set_total(rows, row, SHARE_UNITS, stamp)
    grow(rows, size, 0)


class RecycledDatabase:
    """What the model thought likely in one namespace.

    Attributes:
        table: grows up to ``max_bytes``.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.table = NgramTable(max_bytes - OBJECT_BYTES, MIN_RESERVE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return OBJECT_BYTES + self.table.num_bytes

    @property
    def num_entries(self) -> int:
        """Contexts held, counted when added; at most what the table has room for."""
        return min(int(self.table.size[NUM_ADDED]), self.table.max_buckets * BUCKET_ROWS)

    def limit(self, max_bytes: int) -> int:
        """Take no more than ``max_bytes`` from now on; returns how many contexts were given up."""
        self.max_bytes = max_bytes
        return self.table.limit(max_bytes - OBJECT_BYTES)
