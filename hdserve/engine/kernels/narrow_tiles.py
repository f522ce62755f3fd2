"""Tiles half a block of turned weights wide and of more rows, which meet all inputs, so that
weights come from memory once and one after the other, as processors fetch them ahead.

There are not as many registers as places of rows, so the rows of a tile are laid together before, a
cache line of each::

    chunk 0                               chunk 1
    row 0, inputs 0 to 31 | row 1 | ...   row 0, inputs 32 to 63 | row 1 | ...
"""

from __future__ import annotations

from typing import Any, Final

from hdserve.engine.kernels.blocks import chosen, repeated, zeros
from hdserve.engine.kernels.compiled import apart, inlined
from hdserve.engine.kernels.memory import room_for_bfloats
from hdserve.engine.kernels.pairs import NUM_PAIRED, fuses_rows, load_pairs, store_pairs
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.turned_tiles import (
    COLUMNS_PER_STREAM,
    MOST_ROWS,
    MOST_STREAMS,
    PAIR,
    first_output,
    stores_products,
)

MOST_NARROW_ROWS: Final = 18
"""Two tiles.  From 20 rows on blocks of inputs took as long or less (docs/adr/0034)."""

_MOST_TILE_ROWS: Final = 14
"""With two vectors of weights and a row's their sums fill the registers."""

_MAX_LINES: Final = 4_096
"""Of rows that are laid together on the stack: 256 KB, for 18 rows of 7,281 inputs, of which half a
block of weights takes 466 KB of the second cache."""

_room_for_lines = room_for_bfloats(_MAX_LINES, NUM_PAIRED)


@inlined
def can_multiply_narrowly(num_rows: int, num_inputs: int, num_streams: int) -> bool:
    """Whether these tiles are for so many rows and weights in so many streams, and there is room
    for rows of so many inputs."""
    return (
        MOST_ROWS < num_rows <= MOST_NARROW_ROWS
        and num_streams == MOST_STREAMS
        and num_inputs % NUM_PAIRED == 0
        and num_rows * num_inputs <= _MAX_LINES * NUM_PAIRED
    )


@inlined
def _load_outputs(index: int, given: Any) -> Any:
    weights, line = given
    return load_pairs(weights, (line, index * NUM_PAIRED))


_load_half = repeated(_load_outputs, COLUMNS_PER_STREAM)


@inlined
def _lay_together(rows: Any, first: int, stop: int, lines: Any) -> None:
    """Fill the lines of a tile."""
    num_rows, num_chunks = stop - first, rows.shape[1] // NUM_PAIRED
    for m in range(num_rows):
        line = first * num_chunks + m
        for chunk in range(num_chunks):
            store_pairs(lines, (line, 0), load_pairs(rows, (first + m, chunk * NUM_PAIRED)))
            line += num_rows


def _tile(num_rows: int) -> Any:
    """The product of so many rows and half a block of weights."""
    zero_block, fuse_rows = zeros(num_rows, COLUMNS_PER_STREAM), fuses_rows(num_rows)
    store_products = stores_products(num_rows, COLUMNS_PER_STREAM)

    @inlined
    def multiply_tile(given: Any) -> None:
        lines, weights, bias, products, part = given
        num_inputs, row, block, stream = part
        num_chunks = num_inputs // NUM_PAIRED
        place = row * num_chunks
        line = (block * MOST_STREAMS + stream) * (num_inputs // PAIR)
        sums = zero_block()
        for _ in range(num_chunks):
            for k in range(0, NUM_PAIRED, PAIR):
                outputs = _load_half((weights, line))
                sums = fuse_rows(lines, place, k, outputs, sums)
                line += 1
            place += num_rows
        n = first_output(block, products) + stream * COLUMNS_PER_STREAM * NUM_LANES
        store_products((products, row, n, bias, sums))

    return multiply_tile


_multiply_tile = chosen(
    {number: _tile(number) for number in range(MOST_ROWS + 1, _MOST_TILE_ROWS + 1)}
)


@inlined
def _rows_of(tile: int, num_tiles: int, num_rows: int) -> tuple[int, int]:
    return tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles


@apart
def multiply_narrowly(given: Any, blocks: tuple[int, int]) -> None:
    """The outputs of blocks from one to another, given rows, weights, bias, and products.

    The room on the stack is that of this function alone.
    """
    rows, weights, bias, products = given
    num_rows, num_inputs = rows.shape
    lines = _room_for_lines()
    num_tiles = -(-num_rows // _MOST_TILE_ROWS)
    for tile in range(num_tiles):
        _lay_together(rows, *_rows_of(tile, num_tiles, num_rows), lines)
    for block in range(*blocks):
        for stream in range(MOST_STREAMS):
            for tile in range(num_tiles):
                row, stop = _rows_of(tile, num_tiles, num_rows)
                part = (num_inputs, row, block, stream)
                _multiply_tile(stop - row, (lines, weights, bias, products, part))
