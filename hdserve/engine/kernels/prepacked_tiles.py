"""Tiles of the product of rows with prepacked weights: some rows by a block of outputs."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from hdserve.engine.kernels.block_sums import loads_block, stores_block
from hdserve.engine.kernels.blocks import NUM_COLUMNS, chosen, repeated, zeros
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.pairs import (
    NUM_PAIRED,
    fused_pairs,
    load_pairs,
    spread_pair,
    store_halves,
)
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import added, load, prefetch

OUTPUTS_PER_BLOCK: Final = NUM_COLUMNS * NUM_LANES
"""Outputs of a block, stored together; a matrix has at least as many."""

MAX_STREAMS: Final = 2
"""The most streams a block is stored in: each has half of its outputs."""

COLUMNS_PER_STREAM: Final = NUM_COLUMNS // MAX_STREAMS

NUMBERS_PER_LINE: Final = COLUMNS_PER_STREAM * NUM_PAIRED
"""Weights of a pair of inputs and half the outputs of a block."""

PAIR: Final = 2

MAX_ROWS: Final = 6
"""The most rows of a tile: with four vectors of weights their sums fill the registers."""

FEWEST_OF_SEVERAL: Final = 3
"""The fewest rows of a tile if more than :data:`MAX_ROWS` are divided evenly: 7 are 3 and 4."""


class Part(NamedTuple):
    """What a tile multiplies.

    Attributes:
        row: the first of the tile; ``line`` is the first row of its sums in those of the panel.
        block: of outputs.
        first, stop: the range of inputs.
        tile: its number in the panel.
        num_streams: in which the weights of a block are stored.
    """

    row: int
    line: int
    block: int
    first: int
    stop: int
    tile: int
    num_streams: int


@inlined
def first_output(block: int, products: Any) -> int:
    """The first output of a block; the last block may overlap the one before it."""
    last: int = products.shape[1] - OUTPUTS_PER_BLOCK
    return min(block * OUTPUTS_PER_BLOCK, last)


def stores_products(num_rows: int, num_columns: int, store_vector: Any = store_halves) -> Any:
    """A function for compiled code that stores the sums of a tile, given the products, the first
    row and output, the bias, and the sums; ``store_vector`` stores one vector of them."""

    @inlined
    def store_product(index: int, given: Any) -> None:
        products, m, n, bias, block = given
        column = n + index % num_columns * NUM_LANES
        sums = block[index]
        if bias.shape[0]:
            sums = added(sums, load(bias, (0, column)))
        store_vector(products, (m + index // num_columns, column), sums)

    return repeated(store_product, num_rows * num_columns)


@inlined
def _load_pair(index: int, given: Any) -> Any:
    rows, m, k = given
    return spread_pair(rows, (m + index, k))


@inlined
def _load_outputs(index: int, given: Any) -> Any:
    weights, line, gap = given
    place = index % COLUMNS_PER_STREAM * NUM_PAIRED
    return load_pairs(weights, (line + index // COLUMNS_PER_STREAM * gap, place))


_load_all_outputs = repeated(_load_outputs, NUM_COLUMNS)


@inlined
def steps(num_streams: int, num_words: int) -> tuple[int, int]:
    """How many lines, each of half a block, are between a word of all outputs, a pair of inputs or
    a single one, and the next one, and between its first outputs and the others."""
    return (1, num_words) if num_streams == MAX_STREAMS else (MAX_STREAMS, 1)


def _tile(num_rows: int, *, is_alone: bool) -> Any:
    """The product of ``num_rows`` rows and a block of weights.  One of several tiles also
    prefetches the first or the second half of the next block, and the tile after it the other."""
    zero_block, load_rows = zeros(num_rows), repeated(_load_pair, num_rows)
    load_sums, store_sums = loads_block(num_rows), stores_block(num_rows)
    store_products = stores_products(num_rows, NUM_COLUMNS)

    @inlined
    def multiply_tile(given: Any) -> None:
        rows, weights, bias, products, sums, part = given
        num_inputs = rows.shape[1]
        step, gap = steps(part.num_streams, num_inputs // PAIR)
        line = part.block * num_inputs + part.first // PAIR * step
        num_words = (part.stop - part.first) // PAIR
        ahead = line + num_words * step
        if part.stop == num_inputs:
            ahead = (part.block + 1) * num_inputs
        ahead += part.tile % 2 * max(gap, num_words)
        block = zero_block()
        if not is_alone and part.first:
            block = load_sums((sums, part.line, 0))
        for k in range(part.first, part.stop, PAIR):
            outputs = _load_all_outputs((weights, line, gap))
            if not is_alone:
                prefetch(weights, (ahead, 0))
                prefetch(weights, (ahead, NUM_PAIRED))
                ahead += 1
            block = fused_pairs(load_rows((rows, part.row, k)), outputs, block)
            line += step
        if not is_alone and part.stop < num_inputs:
            store_sums((sums, part.line, 0, block))
        else:
            n = first_output(part.block, products)
            store_products((products, part.row, n, bias, block))

    return multiply_tile


multiply_alone = chosen({number: _tile(number, is_alone=True) for number in range(1, MAX_ROWS + 1)})
"""The product of all inputs of such rows, given ``(rows, weights, bias, products, None, part)``,
``weights`` as ``[num_blocks * num_inputs, NUMBERS_PER_LINE]``."""

multiply_one_of_several = chosen(
    {number: _tile(number, is_alone=False) for number in range(FEWEST_OF_SEVERAL, MAX_ROWS + 1)}
)
"""The product of some inputs of such rows, with the sums of the panel for ``None``."""
