"""Blocks of sums in memory, where they are kept between two blocks of inputs."""

from __future__ import annotations

from typing import Any

from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import load, store


def loads_block(num_rows: int, num_columns: int = NUM_COLUMNS) -> Any:
    """A function for compiled code that loads a block of ``num_rows`` rows, given float32 ``sums
    [..., NUM_COLUMNS * NUM_LANES]``, the line and the column of the first sum."""

    @inlined
    def load_sum(index: int, given: Any) -> Any:
        sums, line, column = given
        return load(sums, (line + index // num_columns, column + index % num_columns * NUM_LANES))

    return repeated(load_sum, num_rows * num_columns)


def stores_block(num_rows: int, num_columns: int = NUM_COLUMNS) -> Any:
    """A function for compiled code that stores such a block, given ``sums``, line, column and
    block."""

    @inlined
    def store_sum(index: int, given: Any) -> None:
        sums, line, column, block = given
        place = line + index // num_columns, column + index % num_columns * NUM_LANES
        store(sums, place, block[index])

    return repeated(store_sum, num_rows * num_columns)
