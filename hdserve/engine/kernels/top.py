"""The largest entries of rows, with few branches.

A first pass over the beginning of a row finds the largest entry of each of 64 lanes, or 32 with
short vectors; the ``k``-th largest of these is at most the ``k``-th largest of all.  The second
pass, over the whole row, looks only where an entry reaches that limit, and the limit rises as
larger ones are found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, floats_at, stack_floats
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import any_reaches, item, larger, load, spread, store

_BLOCK = 4 * NUM_LANES
_BEGINNING = 8192 // _BLOCK * _BLOCK
"""The columns of the first pass, which are still in the L1 cache at the second."""

_NOTHING = np.float32(-np.inf)
_new_lanes = stack_floats(1, _BLOCK)


@inlined
def _empty(values: Any, places: Any, row: int) -> None:
    for index in range(values.shape[1]):
        values[row, index], places[row, index] = _NOTHING, 0


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
def _limit(numbers: Any, lanes: Any, values: Any, places: Any, row: int, stop: int) -> Any:
    """A number that the ``k`` largest of the first ``stop`` entries of a row reach."""
    nothing = spread(_NOTHING)
    first, second, third, fourth = nothing, nothing, nothing, nothing
    for place in range(0, stop, _BLOCK):
        first = larger(load(numbers, (row, place)), first)  # drops NaN
        second = larger(load(numbers, (row, place + NUM_LANES)), second)
        third = larger(load(numbers, (row, place + 2 * NUM_LANES)), third)
        fourth = larger(load(numbers, (row, place + 3 * NUM_LANES)), fourth)
    store(lanes, (0, 0), first)
    store(lanes, (0, NUM_LANES), second)
    store(lanes, (0, 2 * NUM_LANES), third)
    store(lanes, (0, 3 * NUM_LANES), fourth)
    last = values.shape[1] - 1
    for lane in range(_BLOCK):
        if lanes[0, lane] > values[row, last]:
            _insert(values, places, row, lanes[0, lane], lane)
    return values[row, last]


@inlined
def _find(numbers: Any, values: Any, places: Any) -> None:
    num_rows, num_columns = numbers.shape
    lanes = _new_lanes()
    last = values.shape[1] - 1
    whole = num_columns // _BLOCK * _BLOCK
    for row in range(num_rows):
        _empty(values, places, row)
        limit = _NOTHING
        if last < _BLOCK:
            limit = _limit(numbers, lanes, values, places, row, min(whole, _BEGINNING))
            _empty(values, places, row)
        limits = spread(limit)
        for first in range(0, whole, _BLOCK):
            low = larger(load(numbers, (row, first)), spread(_NOTHING))
            low = larger(load(numbers, (row, first + NUM_LANES)), low)
            high = larger(load(numbers, (row, first + 2 * NUM_LANES)), spread(_NOTHING))
            high = larger(load(numbers, (row, first + 3 * NUM_LANES)), high)
            if any_reaches(larger(low, high), limits):
                for part in range(first, first + _BLOCK, NUM_LANES):
                    if any_reaches(load(numbers, (row, part)), limits):
                        _look(numbers, values, places, row, part, part + NUM_LANES)
                if values[row, last] > limit:
                    limit = values[row, last]
                    limits = spread(limit)
        _look(numbers, values, places, row, whole, num_columns)


@entry_point
def find_largest(
    numbers_at: int,
    is_bfloat16: bool,
    num_columns: int,
    values: npt.NDArray[np.float32],
    places: npt.NDArray[np.int64],
) -> None:
    """Find the ``k`` largest of each row of ``[num_rows, num_columns]``, float32 or bfloat16:
    largest first, equal ones in the order of their columns; NaN is never one of them.

    Args:
        values: ``[num_rows, k]``, to be filled; minus infinity if there are fewer.
        places: ``[num_rows, k]``, their columns, to be filled; 0 if there are fewer.
    """
    num_rows = len(values)
    if is_bfloat16:
        _find(bfloats_at(numbers_at, num_rows, num_columns), values, places)
    else:
        _find(floats_at(numbers_at, num_rows, num_columns), values, places)
