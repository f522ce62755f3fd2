"""What is read of a row at once is what a loop over its slots reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hdserve.databases.cache_lines import new_lines
from hdserve.databases.compiled import jit
from hdserve.databases.ngram import FIRST_SLOT, ROW_WORDS, Rows, Tokens
from hdserve.drafting.arrays import (
    CELLS_PER_ROW,
    NUM_RANKS,
    SHARE_BUCKETS,
    SHARE_STEPS,
    Floats,
    new_vectors,
)
from hdserve.drafting.vectors import gather_row, lowest_bit
from hdserve.drafting.votes import held_slots, likely_slots, note_cells

VOCAB_SIZE = 1000
NUM_CELLS = 3 * CELLS_PER_ROW


@jit
def read_row(
    rows: Rows,
    row: int,
    total: int,
    first_cell: int,
    cells: Tokens,
    values: Floats,
    logits: Floats,
    floor: np.float32,
    found: Tokens,
) -> None:
    """What is read of ``rows[row]``, at once."""
    note_cells(cells, rows, row, np.float32(1.0) / np.float32(total), first_cell)
    gather_row(logits, values, 1, cells)
    held = held_slots(rows, row)
    likely = likely_slots(rows, row, VOCAB_SIZE, logits, floor)
    found[0] = held
    found[1] = held & likely
    found[2] = lowest_bit(held) if held != 0 else -1


@st.composite
def slots(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Counts and tokens of a row, as many as there are."""
    slot = st.tuples(st.integers(1, 4095), st.integers(0, 2 * VOCAB_SIZE))
    return draw(st.lists(slot, max_size=ROW_WORDS - FIRST_SLOT))


@given(
    slots(),
    st.integers(0, 60000),
    st.integers(0, 2),
    st.floats(-4.0, 4.0, width=32),
    st.integers(0, 2**32 - 1),
)
def test_a_row_is_read_as_slot_by_slot(
    held: list[tuple[int, int]], others: int, kind: int, floor: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = new_lines(2)
    rows[1, :FIRST_SLOT] = random.integers(0, 2**32, FIRST_SLOT, np.uint32)
    for index, (count, token) in enumerate(held):
        rows[1, FIRST_SLOT + index] = count << 20 | token
    total = max(1, sum(count for count, _ in held) + others)
    values = random.normal(0.0, 2.0, (2, NUM_CELLS)).astype(np.float32)
    cells, logits = new_vectors(1).view(np.int32), new_vectors(1)
    found = np.zeros(3, np.int32)
    read_row(rows, 1, total, kind * CELLS_PER_ROW, cells, values, logits, np.float32(floor), found)
    likely = 0
    scale = np.float32(1.0) / np.float32(total)
    for index, (count, token) in enumerate(held):
        share = SHARE_BUCKETS[int(np.float32(count) * scale * np.float32(SHARE_STEPS))]
        cell = kind * CELLS_PER_ROW + share * NUM_RANKS + min(index, NUM_RANKS - 1)
        assert cells[0, FIRST_SLOT + index] == cell
        assert logits[0, FIRST_SLOT + index] == values[1, cell]
        likely |= int(values[1, cell] >= np.float32(floor) and token < VOCAB_SIZE) << (
            FIRST_SLOT + index
        )
    assert found[0] == ((1 << len(held)) - 1) << FIRST_SLOT
    assert found[1] == likely
    assert found[2] == (FIRST_SLOT if held else -1)
