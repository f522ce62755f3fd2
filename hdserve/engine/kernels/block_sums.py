"""Blocks of sums in memory, where they are kept between two blocks of inputs."""

from __future__ import annotations

from typing import Any

from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import load, store


@inlined
def _load_sum(index: int, given: Any) -> Any:
    sums, line = given
    return load(sums, (line + index // NUM_COLUMNS, index % NUM_COLUMNS * NUM_LANES))


@inlined
def _store_sum(index: int, given: Any) -> None:
    sums, line, block = given
    place = line + index // NUM_COLUMNS, index % NUM_COLUMNS * NUM_LANES
    store(sums, place, block[index])


def loads_block(num_rows: int) -> Any:
    """A function for compiled code that loads a block of ``num_rows`` rows, from a line on, of
    float32 ``sums [..., NUM_COLUMNS * NUM_LANES]``."""
    return repeated(_load_sum, num_rows * NUM_COLUMNS)


def stores_block(num_rows: int) -> Any:
    """A function for compiled code that stores such a block, given ``sums``, line and block."""
    return repeated(_store_sum, num_rows * NUM_COLUMNS)
