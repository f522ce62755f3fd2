"""Tiles of more rows and half a block of prepacked weights, which multiply all inputs, so that
weights are read from memory once and sequentially, as processors prefetch them.

There are fewer registers than pointers to rows, so the rows of a tile are copied together first,
one cache line of each::

    chunk 0                               chunk 1
    row 0, inputs 0 to 31 | row 1 | ...   row 0, inputs 32 to 63 | row 1 | ...
"""

from __future__ import annotations

from typing import Any, Final

from hdserve.engine.kernels.blocks import chosen, repeated, zeros
from hdserve.engine.kernels.compiled import apart, inlined
from hdserve.engine.kernels.memory import stack_bfloats
from hdserve.engine.kernels.pairs import NUM_PAIRED, fuses_rows, load_pairs, store_pairs
from hdserve.engine.kernels.prepacked_tiles import (
    COLUMNS_PER_STREAM,
    MAX_ROWS,
    MAX_STREAMS,
    PAIR,
    first_output,
    stores_products,
)
from hdserve.engine.kernels.registers import NUM_LANES

MAX_NARROW_ROWS: Final = 18
"""Two tiles.  From 20 rows on, blocks of inputs took as long or less (docs/adr/0034)."""

_MAX_TILE_ROWS: Final = 14
"""With two vectors of weights and one of a row, their sums fill the registers."""

_MAX_LINES: Final = 4_096
"""Memory on the stack for rows copied together: 256 KB, for 18 rows of 7,281 inputs, half a block
of whose weights takes 466 KB of the L2 cache."""

_stack_lines = stack_bfloats(_MAX_LINES, NUM_PAIRED)


@inlined
def can_multiply_narrowly(num_rows: int, num_inputs: int, num_streams: int) -> bool:
    """Whether these tiles support this many rows and streams of weights, and rows of this many
    inputs fit on the stack."""
    return (
        MAX_ROWS < num_rows <= MAX_NARROW_ROWS
        and num_streams == MAX_STREAMS
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
    """Copy the lines of a tile together."""
    num_rows, num_chunks = stop - first, rows.shape[1] // NUM_PAIRED
    for m in range(num_rows):
        line = first * num_chunks + m
        for chunk in range(num_chunks):
            store_pairs(lines, (line, 0), load_pairs(rows, (first + m, chunk * NUM_PAIRED)))
            line += num_rows


def _tile(num_rows: int) -> Any:
    """The product of ``num_rows`` rows and half a block of weights."""
    zero_block, fuse_rows = zeros(num_rows, COLUMNS_PER_STREAM), fuses_rows(num_rows)
    store_products = stores_products(num_rows, COLUMNS_PER_STREAM)

    @inlined
    def multiply_tile(given: Any) -> None:
        lines, weights, bias, products, part = given
        num_inputs, row, block, stream = part
        num_chunks = num_inputs // NUM_PAIRED
        place = row * num_chunks
        line = (block * MAX_STREAMS + stream) * (num_inputs // PAIR)
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
    {number: _tile(number) for number in range(MAX_ROWS + 1, _MAX_TILE_ROWS + 1)}
)


@inlined
def _rows_of(tile: int, num_tiles: int, num_rows: int) -> tuple[int, int]:
    return tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles


@apart
def multiply_narrowly(given: Any, blocks: tuple[int, int]) -> None:
    """Compute the outputs of a range of blocks, given rows, weights, bias, and products.

    The memory on the stack is only this function's.
    """
    rows, weights, bias, products = given
    num_rows, num_inputs = rows.shape
    lines = _stack_lines()
    num_tiles = -(-num_rows // _MAX_TILE_ROWS)
    for tile in range(num_tiles):
        _lay_together(rows, *_rows_of(tile, num_tiles, num_rows), lines)
    for block in range(*blocks):
        for stream in range(MAX_STREAMS):
            for tile in range(num_tiles):
                row, stop = _rows_of(tile, num_tiles, num_rows)
                part = (num_inputs, row, block, stream)
                _multiply_tile(stop - row, (lines, weights, bias, products, part))
