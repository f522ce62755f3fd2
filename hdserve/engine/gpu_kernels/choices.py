"""The largest entries of rows of logits, and a token drawn of each: first of blocks of columns,
then of those results."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.noise import FIRST_FACTOR, SECOND_FACTOR, SPACING

_COLUMNS: Final = 2048
"""The columns that one program of the first kernel reads."""

# Where one buffer begins behind another depends on the number of rows.  A kernel that assumes
# whether that is a multiple of 16 bytes would be compiled twice, perhaps while a request waits.


def find_and_draw(rows: torch.Tensor, k: int, races: torch.Tensor) -> torch.Tensor:
    """The ``k`` largest entries of every row of ``rows [num_rows, num_columns]``, with columns, and
    the column that arrives first in the row's race, see :mod:`hdserve.noise`.

    NaN counts as minus infinity.  If a row has fewer than ``k`` entries above that, the rest are
    minus infinity, with column 0.

    Args:
        races: ``[2, num_rows]`` int64: the key of each row's position, and the bits of the inverse
            temperature as a float64, 0 where nothing is to be drawn.

    Returns:
        ``[2, num_rows, k + 1]`` float32: the largest entries, equal ones by column, then 0; and the
        bits of int32 columns: theirs, then the drawn one, which is
        :data:`~hdserve.engine.kernels.draw.NO_TOKEN` if none is drawn or the first to arrive is
        infinite.
    """
    num_rows, num_columns = rows.shape
    num_blocks = triton.cdiv(num_columns, _COLUMNS)
    keys, inverse_temperatures = races[0], races[1].view(torch.float64)
    found = rows.new_empty((2, num_rows, num_blocks, k), dtype=torch.float32)
    columns_found = found[1].view(torch.int32)
    scores = rows.new_empty((num_rows, num_blocks), dtype=torch.float64)
    drawn = rows.new_empty((num_rows, num_blocks), dtype=torch.int32)
    _of_blocks[(num_rows, num_blocks)](
        *(rows, rows.stride(0), num_columns, found[0], columns_found, num_blocks),
        *(keys, inverse_temperatures, scores, drawn),
        K=k,
        COLUMNS=_COLUMNS,
        SPACING=SPACING,
        FIRST=FIRST_FACTOR,
        SECOND=SECOND_FACTOR,
    )
    tokens = rows.new_empty((2, num_rows, k + 1), dtype=torch.float32)
    _of_found[(num_rows,)](
        *(found[0], columns_found, num_blocks * k, tokens[0], tokens[1].view(torch.int32)),
        *(inverse_temperatures, scores, drawn, num_blocks),
        K=k,
        COLUMNS=triton.next_power_of_2(num_blocks * k),
        BLOCKS=triton.next_power_of_2(num_blocks),
        NO_TOKEN=NO_TOKEN,
    )
    return tokens


@triton.jit(do_not_specialize_on_alignment=["columns"])
def _of_blocks(
    rows,
    rows_stride,
    num_columns,
    values,
    columns,
    num_blocks,
    keys,
    inverse_temperatures,
    scores,
    drawn,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPACING: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    number = tl.load(rows + row * rows_stride + column, mask=is_column, other=-float("inf"))
    number = number.to(tl.float32)
    number = tl.where(number == number, number, -float("inf"))
    inverse_temperature = tl.load(inverse_temperatures + row)
    if inverse_temperature > 0:
        score = _arrivals(column, tl.load(keys + row), SPACING, FIRST, SECOND)
        score += number.to(tl.float64) * inverse_temperature
        best, place = tl.max(score, axis=0, return_indices=True)
        tl.store(scores + row * num_blocks + block, best)
        tl.store(drawn + row * num_blocks + block, block * COLUMNS + place)
    at = (row * num_blocks + block) * K
    for index in tl.static_range(K):
        value, place = tl.max(number, axis=0, return_indices=True)
        tl.store(values + at + index, value)
        tl.store(columns + at + index, block * COLUMNS + place)
        number = tl.where(column == block * COLUMNS + place, -float("inf"), number)


@triton.jit
def _arrivals(column, key, SPACING: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Minus the logarithm of the time after which each column would arrive with a weight of 1; the
    logarithm of its weight is to be added.  The largest sum arrives first."""
    word = _scrambled(column.to(tl.uint32) * SPACING + key.to(tl.uint32), FIRST, SECOND)
    word = _scrambled(word ^ (key >> 32).to(tl.uint32), FIRST, SECOND)
    return -libdevice.log(-libdevice.log1p(-(word.to(tl.float64) + 0.5) * 2.0**-32))


@triton.jit
def _scrambled(word, FIRST: tl.constexpr, SECOND: tl.constexpr):
    word ^= word >> 16
    word *= FIRST
    word ^= word >> 13
    word *= SECOND
    return word ^ (word >> 16)


@triton.jit(do_not_specialize_on_alignment=["columns", "places"])
def _of_found(
    values,
    columns,
    num_found,
    largest,
    places,
    inverse_temperatures,
    scores,
    drawn,
    num_blocks,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index_of = tl.arange(0, COLUMNS)
    is_found = index_of < num_found
    number = tl.load(values + row * num_found + index_of, mask=is_found, other=-float("inf"))
    largest += row * (K + 1)
    places += row * (K + 1)
    for index in tl.static_range(K):
        value, place = tl.max(number, axis=0, return_indices=True)
        column = tl.load(columns + row * num_found + place)
        tl.store(largest + index, value)
        tl.store(places + index, tl.where(value > -float("inf"), column, 0))
        number = tl.where(index_of == place, -float("inf"), number)
    token = NO_TOKEN
    if tl.load(inverse_temperatures + row) > 0:
        block = tl.arange(0, BLOCKS)
        at = row * num_blocks
        score = tl.load(scores + at + block, mask=block < num_blocks, other=-float("inf"))
        best, place = tl.max(score, axis=0, return_indices=True)
        token = tl.where(tl.abs(best) < float("inf"), tl.load(drawn + at + place), NO_TOKEN)
    tl.store(largest + K, 0.0)
    tl.store(places + K, token)
