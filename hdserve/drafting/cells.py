"""The kinds of evidence: which cell holds how often evidence of one kind was right."""

from __future__ import annotations

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.drafting.arrays import (
    ABSENT_CELLS,
    NUM_LENGTHS,
    NUM_MISSES,
    NUM_ORDERS,
    NUM_TOTALS,
    PRESENT_CELLS,
    ROWS_PER_LEVEL,
    SHARE_BUCKETS,
    SHARE_STEPS,
)


@fast_inlined
def share_bucket(share: float) -> int:
    """0 to 7 by the share of a row's count; in a damaged row the share may exceed 1."""
    return SHARE_BUCKETS[np.uint64(min(share, np.float32(1.0)) * np.float32(SHARE_STEPS))]


@fast_inlined
def total_bucket(total: int) -> int:
    """0 to 5 by the count of a row."""
    if total <= 2:
        return 0 if total <= 1 else 1
    if total <= 16:
        return 2 if total <= 4 else 3
    return 4 if total <= 128 else 5


@fast_inlined
def row_kind(level: int, order: int, total: int, place: int) -> int:
    """The kind of evidence of a row: its cells are ``CELLS_PER_ROW`` from ``kind * CELLS_PER_ROW``
    on; the cells for tokens it lacks are ``NUM_SHARES`` from ``PRESENT_CELLS + kind * NUM_SHARES``
    on."""
    return ((level * NUM_ORDERS + order) * NUM_TOTALS + total) * ROWS_PER_LEVEL + place


@fast_inlined
def pointer_cell(which: int, is_agreeing: int, length: int, misses: int) -> int:
    """The cell of a pointer's vote for the token it points to, or against another one."""
    bucket = length if length < 8 else min(NUM_LENGTHS - 1, 8 + ((length - 8) >> 2))
    base = PRESENT_CELLS + ABSENT_CELLS
    kind = (which * 2 + is_agreeing) * NUM_LENGTHS + bucket
    return base + kind * NUM_MISSES + min(misses, NUM_MISSES - 1)


@fast_inlined
def pointer_state(length: int) -> int:
    """1 to 3 by the length of a pointer that does not agree; 0 means none."""
    return 1 + (0 if length < 8 else (1 if length < 16 else 2))
