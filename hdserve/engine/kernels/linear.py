"""Products of few rows with a matrix of weights, at about the cost of reading the weights once.

Libraries are made for many rows or for one.  Between 2 and 32, the size of a draft tree or of a
batch of them, they take up to three times as long as the weights take to be read.

Every number is a sum over the row in an order that does not depend on the other rows, with
operations whose rounding is fixed (:mod:`~hdserve.engine.kernels.vectors`), so a row gets the same
bits whatever else is in the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from hdserve.engine.kernels.block_sums import loads_block, stores_block
from hdserve.engine.kernels.blocks import NUM_COLUMNS, fused_block, repeated, zeros
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, floats_at, stack_floats
from hdserve.engine.kernels.registers import NUM_LANES, NUM_ROWS
from hdserve.engine.kernels.vectors import load, prefetch, store_totals

OUTPUTS_AT_ONCE = NUM_COLUMNS
"""Outputs that are computed together; the number of outputs of a matrix is a multiple of it."""

_ROWS_PER_PANEL = 8 * NUM_ROWS
"""Rows that fit into the processor's cache, and are multiplied while they are there."""

VECTORS_PER_BLOCK: Final = 32
"""Vectors of inputs in a block: those of a tile's rows and outputs fit into the L1 cache."""

_INPUTS_PER_BLOCK: Final = VECTORS_PER_BLOCK * NUM_LANES

_MAX_ROWS_IN_WHOLE = 2 * NUM_ROWS
"""If there are more rows, and they are long, they are multiplied in blocks (docs/adr/0017)."""


class Part(NamedTuple):
    """What a tile multiplies, for compiled code.

    Attributes:
        row, output: the first of the tile.
        line: the first row of ``sums`` that the tile uses.
        first, stop: the range of inputs.
        next_output, next_input: the weights that are multiplied next.
    """

    row: int
    output: int
    line: int
    first: int
    stop: int
    next_output: int
    next_input: int


def _panel_multiplier(tile: Callable[[int], Any]) -> Any:
    """The product of a panel of rows for compiled code: in tiles of ``NUM_ROWS`` rows, and a last
    one of fewer.

    Args:
        tile: makes the product of a number of rows and four outputs for compiled code: a function
            of the rows, the weights, the products, memory for the sums of a panel, and a
            :class:`Part`.
    """
    multiply_several, multiply_three = tile(NUM_ROWS), tile(3)
    multiply_two, multiply_one = tile(2), tile(1)

    @inlined
    def multiply(
        rows: Any, weights: Any, products: Any, sums: Any, part: Part, num_rows: int
    ) -> None:
        panel, n, _line, first, stop, next_n, next_k = part
        num_left = num_rows % NUM_ROWS
        whole = num_rows - num_left
        for line in range(0, whole, NUM_ROWS):
            part = Part(panel + line, n, line, first, stop, next_n, next_k)
            multiply_several(rows, weights, products, sums, part)
        part = Part(panel + whole, n, whole, first, stop, next_n, next_k)
        if num_left == 1:
            multiply_one(rows, weights, products, sums, part)
        elif num_left == 2:
            multiply_two(rows, weights, products, sums, part)
        elif num_left == 3:
            multiply_three(rows, weights, products, sums, part)

    return multiply


def _multiplier_of(tile: Callable[[int], Any]) -> Any:
    """The product over whole rows for compiled code."""
    multiply_panel = _panel_multiplier(tile)

    @inlined
    def multiply(rows: Any, weights: Any, products: Any, first: int, stop: int) -> None:
        num_rows, num_inputs = rows.shape
        for panel in range(0, num_rows, _ROWS_PER_PANEL):
            size = min(_ROWS_PER_PANEL, num_rows - panel)
            for n in range(first, stop, OUTPUTS_AT_ONCE):
                ahead = min(n + OUTPUTS_AT_ONCE, stop - OUTPUTS_AT_ONCE)
                part = Part(panel, n, 0, 0, num_inputs, ahead, 0)
                multiply_panel(rows, weights, products, None, part, size)

    return multiply


def _block_multiplier_of(tile: Callable[[int], Any]) -> Any:
    """The product over blocks of inputs for compiled code; between blocks, the sums of a panel of
    rows and four outputs are kept in memory::

                 inputs        block 0 | block 1 | ...
        four outputs           weights | weights |        each for all tiles of the panel
        tile 0 of the panel       sums -> sums   -> ...
        tile 1                    sums -> sums   -> ...
    """
    multiply_panel = _panel_multiplier(tile)
    stack_sums = stack_floats(_ROWS_PER_PANEL, NUM_COLUMNS * NUM_LANES)

    @inlined
    def multiply(rows: Any, weights: Any, products: Any, first: int, stop: int) -> None:
        num_rows, num_inputs = rows.shape
        sums = stack_sums()
        for panel in range(0, num_rows, _ROWS_PER_PANEL):
            size = min(_ROWS_PER_PANEL, num_rows - panel)
            for n in range(first, stop, OUTPUTS_AT_ONCE):
                for k in range(0, num_inputs, _INPUTS_PER_BLOCK):
                    k_stop = min(k + _INPUTS_PER_BLOCK, num_inputs)
                    ahead_n, ahead_k = n, k_stop
                    if k_stop == num_inputs:
                        ahead_n, ahead_k = min(n + OUTPUTS_AT_ONCE, stop - OUTPUTS_AT_ONCE), 0
                    part = Part(panel, n, 0, k, k_stop, ahead_n, ahead_k)
                    multiply_panel(rows, weights, products, sums, part, size)

    return multiply


def _tile(num_rows: int, *, is_whole: bool) -> Any:
    """The product of ``num_rows`` rows and four outputs, over whole rows or a block of inputs."""
    zero_block = zeros(num_rows)
    load_sums, store_sums = loads_block(num_rows), stores_block(num_rows)

    @inlined
    def load_line(index: int, given: Any) -> Any:
        matrix, line, column = given
        return load(matrix, (line + index, column))

    @inlined
    def store_row(index: int, given: Any) -> None:
        products, m, n, block = given
        first = index * NUM_COLUMNS
        a, b, c, d = block[first], block[first + 1], block[first + 2], block[first + 3]
        store_totals(products, (m + index, n), a, b, c, d)

    load_rows, load_outputs = repeated(load_line, num_rows), repeated(load_line, NUM_COLUMNS)
    store_rows = repeated(store_row, num_rows)

    @inlined
    def multiply_tile(rows: Any, weights: Any, products: Any, sums: Any, part: Part) -> None:
        """Prefetches the weights that come next: of all four outputs if there is one row, else of
        two, since the other rows fetch the rest."""
        ahead = part.next_output
        if num_rows == NUM_ROWS:
            ahead += part.row // NUM_ROWS % OUTPUTS_AT_ONCE
        distance = 0 if is_whole else part.next_input - part.first
        block = zero_block()
        if not is_whole and part.first:
            block = load_sums((sums, part.line, 0))
        for k in range(0 if is_whole else part.first, part.stop, NUM_LANES):
            outputs = load_outputs((weights, part.output, k))
            prefetch(weights, (ahead, k + distance))
            prefetch(weights, (ahead ^ 2, k + distance))
            if num_rows == 1:
                prefetch(weights, (ahead ^ 1, k + distance))
                prefetch(weights, (ahead ^ 3, k + distance))
            block = fused_block(load_rows((rows, part.row, k)), outputs, block)
        if is_whole or part.stop == rows.shape[1]:
            store_rows((products, part.row, part.output, block))
        else:
            store_sums((sums, part.line, 0, block))

    return multiply_tile


_multiply_in_whole = _multiplier_of(partial(_tile, is_whole=True))
_multiply_in_blocks = _block_multiplier_of(partial(_tile, is_whole=False))


@inlined
def _multiply(rows: Any, weights: Any, products: Any, first: int, stop: int) -> None:
    num_rows, num_inputs = rows.shape
    if num_rows > _MAX_ROWS_IN_WHOLE and num_inputs > 2 * _INPUTS_PER_BLOCK:
        _multiply_in_blocks(rows, weights, products, first, stop)
    else:
        _multiply_in_whole(rows, weights, products, first, stop)


@entry_point
def multiply_at(
    rows_at: int,
    weights_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: int,
    first: int,
    stop: int,
) -> None:
    """Compute the outputs ``first`` to ``stop``, both multiples of :data:`OUTPUTS_AT_ONCE`.

    Args:
        rows_at: float32 ``[num_rows, num_inputs]``, the inputs a multiple of the lanes.
        weights_at: ``[num_outputs, num_inputs]``, bfloat16 or float32.
        is_bfloat16: 1 or 0, as C has it.
        products_at: float32 ``[num_rows, num_outputs]``, to be filled.
    """
    rows = floats_at(rows_at, num_rows, num_inputs)
    products = floats_at(products_at, num_rows, num_outputs)
    if is_bfloat16:
        weights = bfloats_at(weights_at, num_outputs, num_inputs)
        _multiply(rows, weights, products, first, stop)
    else:
        floats = floats_at(weights_at, num_outputs, num_inputs)
        _multiply(rows, floats, products, first, stop)
