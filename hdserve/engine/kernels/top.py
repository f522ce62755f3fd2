"""The largest entries of rows, in one pass over them.

Sixty-four entries at a time are compared with the smallest one kept so far, then a quarter of them;
only if one is larger are they looked at one by one, which is rare after the first few.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, floats_at, integers_at
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import item, larger, largest, load, spread

_BLOCK = 4 * NUM_LANES
_NOTHING = np.float32(-np.inf)


@inlined
def _insert(values: Any, places: Any, row: int, value: Any, place: int) -> None:
    """Insert a value in order, after equal ones; the smallest one is dropped."""
    index = values.shape[1] - 1
    while index > 0 and values[row, index - 1] < value:
        values[row, index] = values[row, index - 1]
        places[row, index] = places[row, index - 1]
        index -= 1
    values[row, index], places[row, index] = value, place


@inlined
def _look(numbers: Any, values: Any, places: Any, row: int, first: int, stop: int) -> None:
    last = values.shape[1] - 1
    for place in range(first, stop):
        number = item(numbers, (row, place))
        if number > values[row, last]:
            _insert(values, places, row, number, place)


@inlined
def _find(numbers: Any, values: Any, places: Any) -> None:
    num_rows, num_columns = numbers.shape
    last = values.shape[1] - 1
    whole = num_columns // _BLOCK * _BLOCK
    for row in range(num_rows):
        for index in range(last + 1):
            values[row, index], places[row, index] = _NOTHING, 0
        for first in range(0, whole, _BLOCK):
            low = larger(load(numbers, (row, first)), spread(_NOTHING))  # drops NaN
            low = larger(load(numbers, (row, first + NUM_LANES)), low)
            high = larger(load(numbers, (row, first + 2 * NUM_LANES)), spread(_NOTHING))
            high = larger(load(numbers, (row, first + 3 * NUM_LANES)), high)
            block = larger(low, high)
            if largest(block) > values[row, last]:
                for part in range(first, first + _BLOCK, NUM_LANES):
                    quarter = larger(load(numbers, (row, part)), spread(_NOTHING))
                    if largest(quarter) > values[row, last]:
                        _look(numbers, values, places, row, part, part + NUM_LANES)
        _look(numbers, values, places, row, whole, num_columns)


@entry_point
def find_largest(
    numbers_at: int,
    is_bfloat16: bool,
    num_rows: int,
    num_columns: int,
    values_at: int,
    places_at: int,
    k: int,
) -> None:
    """Find the ``k`` largest of each row of ``[num_rows, num_columns]``, float32 or bfloat16:
    largest first, equal ones in the order of their columns; NaN is never one of them.

    Args:
        values_at: float32 ``[num_rows, k]``, to be filled; minus infinity if there are fewer.
        places_at: int64 ``[num_rows, k]``, their columns, to be filled; 0 if there are fewer.
    """
    values, places = floats_at(values_at, num_rows, k), integers_at(places_at, num_rows, k)
    if is_bfloat16:
        _find(bfloats_at(numbers_at, num_rows, num_columns), values, places)
    else:
        _find(floats_at(numbers_at, num_rows, num_columns), values, places)
