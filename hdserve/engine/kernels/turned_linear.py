"""Products of rows with weights that were turned, both in bfloat16, by the processor's own products
of pairs.

A vector has a pair of inputs of many outputs, and meets the same pair of a row in all lanes::

    weights                      turned
    output 0   a0 a1 a2 a3       inputs 0, 1   a0 a1 | b0 b1 | ...
    output 1   b0 b1 b2 b3       inputs 2, 3   a2 a3 | b2 b3 | ...

So an output is a sum along one lane; in :mod:`~hdserve.engine.kernels.pair_linear` it is one across
all of them, which takes as long as the products where inputs are few.  A row comes out with the
same bits whatever else is in the product, but with others than there.

Weights are multiplied in blocks that fit into the first cache, and while all rows of a panel meet
one of them the next is fetched (docs/adr/0034)::

                           inputs   block 0 | block 1 | ...
    outputs 0 to 63                 weights | weights |      each for all tiles of the panel
    tile 0 of the panel                sums -> sums   -> ...
    tile 1                             sums -> sums   -> ...
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from hdserve.engine.kernels.block_sums import loads_block, stores_block
from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated, zeros
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, room_for_floats
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
"""Outputs that lie together; a matrix has at least as many."""

INPUTS_PER_BLOCK: Final = 128
"""Inputs of a block of weights, which takes 16 KB: two of them fit into the first cache."""

MOST_ROWS: Final = 6
"""Rows of a tile: with four vectors of weights their sums fill the registers."""

_FEWEST_OF_SEVERAL: Final = 3
"""Rows of the smallest tile where more than :data:`MOST_ROWS` are divided evenly: 7 are 3 and 4."""

_MAX_ROWS_PER_PANEL: Final = 256
"""While so many rows meet a block of weights, the next one has long been read from memory."""

_PAIR = 2


class _Part(NamedTuple):
    """What a tile multiplies.

    Attributes:
        row: the first of the tile, and ``line`` where its sums are in those of the panel.
        block: of outputs.
        first, stop: the inputs, from one to another.
        tile: its number in the panel.
    """

    row: int
    line: int
    block: int
    first: int
    stop: int
    tile: int


@inlined
def _load_pair(index: int, given: Any) -> Any:
    rows, m, k = given
    return spread_pair(rows, (m + index, k))


@inlined
def _load_outputs(index: int, given: Any) -> Any:
    weights, line = given
    return load_pairs(weights, (line, index * NUM_PAIRED))


@inlined
def _store_product(index: int, given: Any) -> None:
    products, m, n, bias, block = given
    column = n + index % NUM_COLUMNS * NUM_LANES
    sums = block[index]
    if bias.shape[0]:
        sums = added(sums, load(bias, (0, column)))
    store_halves(products, (m + index // NUM_COLUMNS, column), sums)


_load_all_outputs = repeated(_load_outputs, NUM_COLUMNS)


def _tile(num_rows: int, *, is_alone: bool) -> Any:
    """The product of so many rows and a block of weights.  One of several tiles meanwhile fetches
    every other vector of the next block, and the one after it the rest."""
    zero_block, load_rows = zeros(num_rows), repeated(_load_pair, num_rows)
    load_sums, store_sums = loads_block(num_rows), stores_block(num_rows)
    store_products = repeated(_store_product, num_rows * NUM_COLUMNS)

    @inlined
    def multiply_tile(
        rows: Any, weights: Any, bias: Any, products: Any, sums: Any, part: _Part
    ) -> None:
        num_inputs = rows.shape[1]
        line = (part.block * num_inputs + part.first) // _PAIR
        ahead = (part.stop - part.first) // _PAIR
        other = part.tile % 2 * NUM_PAIRED
        block = zero_block()
        if not is_alone and part.first:
            block = load_sums((sums, part.line))
        for k in range(part.first, part.stop, _PAIR):
            outputs = _load_all_outputs((weights, line))
            if not is_alone:
                prefetch(weights, (line + ahead, other))
                prefetch(weights, (line + ahead, other + 2 * NUM_PAIRED))
            block = fused_pairs(load_rows((rows, part.row, k)), outputs, block)
            line += 1
        if not is_alone and part.stop < num_inputs:
            store_sums((sums, part.line, block))
        else:
            n = min(part.block * OUTPUTS_PER_BLOCK, products.shape[1] - OUTPUTS_PER_BLOCK)
            store_products((products, part.row, n, bias, block))

    return multiply_tile


_one, _two, _three, _four, _five, _six = (
    _tile(num_rows, is_alone=True) for num_rows in range(1, MOST_ROWS + 1)
)
_three_of_more, _four_of_more, _five_of_more, _six_of_more = (
    _tile(num_rows, is_alone=False) for num_rows in range(_FEWEST_OF_SEVERAL, MOST_ROWS + 1)
)


@inlined
def _multiply_alone(
    rows: Any, weights: Any, bias: Any, products: Any, part: _Part, num_rows: int
) -> None:
    if num_rows == 1:
        _one(rows, weights, bias, products, None, part)
    elif num_rows == 2:
        _two(rows, weights, bias, products, None, part)
    elif num_rows == 3:
        _three(rows, weights, bias, products, None, part)
    elif num_rows == 4:
        _four(rows, weights, bias, products, None, part)
    elif num_rows == 5:
        _five(rows, weights, bias, products, None, part)
    else:
        _six(rows, weights, bias, products, None, part)


@inlined
def _multiply_one_of_several(
    rows: Any, weights: Any, bias: Any, products: Any, sums: Any, part: _Part, num_rows: int
) -> None:
    if num_rows == 3:
        _three_of_more(rows, weights, bias, products, sums, part)
    elif num_rows == 4:
        _four_of_more(rows, weights, bias, products, sums, part)
    elif num_rows == 5:
        _five_of_more(rows, weights, bias, products, sums, part)
    else:
        _six_of_more(rows, weights, bias, products, sums, part)


_room_for_sums = room_for_floats(_MAX_ROWS_PER_PANEL, OUTPUTS_PER_BLOCK)


@inlined
def _multiply_few(rows: Any, weights: Any, bias: Any, products: Any, first: int, stop: int) -> None:
    num_rows, num_inputs = rows.shape
    for block in range(first, stop):
        part = _Part(0, 0, block, 0, num_inputs, 0)
        _multiply_alone(rows, weights, bias, products, part, num_rows)


@inlined
def _multiply_many(
    rows: Any, weights: Any, bias: Any, products: Any, first: int, stop: int
) -> None:
    num_rows, num_inputs = rows.shape
    sums = _room_for_sums()
    num_panels = -(-num_rows // _MAX_ROWS_PER_PANEL)
    for number in range(num_panels):
        panel = number * num_rows // num_panels
        size = (number + 1) * num_rows // num_panels - panel
        num_tiles = -(-size // MOST_ROWS)
        for block in range(first, stop):
            for k in range(0, num_inputs, INPUTS_PER_BLOCK):
                k_stop = min(k + INPUTS_PER_BLOCK, num_inputs)
                line = 0
                for tile in range(num_tiles):
                    num_own = (size + tile) // num_tiles
                    part = _Part(panel + line, line, block, k, k_stop, tile)
                    _multiply_one_of_several(rows, weights, bias, products, sums, part, num_own)
                    line += num_own


@entry_point
def multiply_turned_at(
    rows_at: int,
    weights_at: int,
    bias_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    first: int,
    stop: int,
) -> None:
    """The outputs of the blocks from ``first`` to ``stop``.

    Args:
        rows_at: bfloat16 ``[num_rows, num_inputs]``.
        weights_at: what :func:`~hdserve.engine.turned_weights.turn` made of the weights.
        bias_at: bfloat16 ``[num_outputs]``, or 0 for none.
        products_at: bfloat16 ``[num_rows, num_outputs]``, to be filled.
    """
    rows = bfloats_at(rows_at, num_rows, num_inputs)
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    lines = num_blocks * num_inputs // _PAIR
    weights = bfloats_at(weights_at, lines, _PAIR * OUTPUTS_PER_BLOCK)
    products = bfloats_at(products_at, num_rows, num_outputs)
    bias = bfloats_at(bias_at, min(bias_at, 1), num_outputs)
    if 0 < num_rows <= MOST_ROWS:
        _multiply_few(rows, weights, bias, products, first, stop)
    else:
        _multiply_many(rows, weights, bias, products, first, stop)
