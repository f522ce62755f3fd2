"""Rows are given away and taken back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve.engine.kv_cache.segments import ROW_ALIGNMENT, RowAllocator, align


def test_freeing_twice_is_our_own_fault() -> None:
    """A segment that is freed twice breaks an invariant, and is noticed."""
    rows = RowAllocator(320)
    segment = rows.allocate(40)
    assert segment is not None
    rows.free(segment)
    with pytest.raises(AssertionError):
        rows.free(segment)


@given(number=st.integers(0, 5000), alignment=st.sampled_from([1, 4, 32, 512]))
def test_align(number: int, alignment: int) -> None:
    """Rounding up goes to the next multiple and no further."""
    rounded = align(number, alignment)
    assert rounded % alignment == 0
    assert number <= rounded < number + alignment


def test_rows_taken_in_a_gap_leave_the_gaps_behind_it() -> None:
    rows = RowAllocator(4 * ROW_ALIGNMENT)
    segments = [rows.allocate(ROW_ALIGNMENT) for _ in range(4)]
    for segment in segments[::2]:
        assert segment is not None
        rows.free(segment)
    assert rows.allocate_at(0, ROW_ALIGNMENT) == segments[0]
    assert rows.num_free == ROW_ALIGNMENT
    assert rows.allocate_at(2 * ROW_ALIGNMENT, ROW_ALIGNMENT) == segments[2]
