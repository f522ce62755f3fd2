"""The largest entries of rows of logits: first of blocks of columns, then of those results."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_COLUMNS: Final = 2048
"""The columns that one program of the first kernel reads."""


def find_largest(rows: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` largest entries of every row of ``rows [num_rows, num_columns]``, with columns.

    NaN counts as minus infinity.  If a row has fewer than ``k`` entries above that, the rest are
    minus infinity, with column 0.

    Returns:
        ``[2, num_rows, k]`` float32, largest first, equal ones by column: the entries, and the
        bits of their int32 columns.
    """
    num_rows, num_columns = rows.shape
    num_blocks = triton.cdiv(num_columns, _COLUMNS)
    found = rows.new_empty((2, num_rows, num_blocks, k), dtype=torch.float32)
    columns_found = found[1].view(torch.int32)
    _of_blocks[(num_rows, num_blocks)](
        *(rows, rows.stride(0), num_columns, found[0], columns_found, num_blocks),
        K=k,
        COLUMNS=_COLUMNS,
    )
    largest = rows.new_empty((2, num_rows, k), dtype=torch.float32)
    _of_found[(num_rows,)](
        *(found[0], columns_found, num_blocks * k, largest[0], largest[1].view(torch.int32)),
        K=k,
        COLUMNS=triton.next_power_of_2(num_blocks * k),
    )
    return largest


@triton.jit
def _of_blocks(
    rows,
    rows_stride,
    num_columns,
    values,
    columns,
    num_blocks,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    number = tl.load(rows + row * rows_stride + column, mask=is_column, other=-float("inf"))
    number = number.to(tl.float32)
    number = tl.where(number == number, number, -float("inf"))
    at = (row * num_blocks + block) * K
    for index in tl.static_range(K):
        value, place = tl.max(number, axis=0, return_indices=True)
        tl.store(values + at + index, value)
        tl.store(columns + at + index, block * COLUMNS + place)
        number = tl.where(column == block * COLUMNS + place, -float("inf"), number)


@triton.jit
def _of_found(
    values,
    columns,
    num_found,
    largest,
    places,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index_of = tl.arange(0, COLUMNS)
    is_found = index_of < num_found
    number = tl.load(values + row * num_found + index_of, mask=is_found, other=-float("inf"))
    for index in tl.static_range(K):
        value, place = tl.max(number, axis=0, return_indices=True)
        column = tl.load(columns + row * num_found + place)
        tl.store(largest + row * K + index, value)
        tl.store(places + row * K + index, tl.where(value > -float("inf"), column, 0))
        number = tl.where(index_of == place, -float("inf"), number)
