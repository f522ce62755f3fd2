"""Products of few rows with a matrix of weights, at about the price of reading the weights once.

Libraries are made for many rows or for one.  Between 2 and 32, the size of a draft tree or of a
batch of them, they take up to three times as long as the weights take to be read.

Every number is a sum over the row in an order that does not depend on the other rows, with
operations whose rounding is fixed (:mod:`~hdserve.engine.kernels.vectors`), so a row comes out with
the same bits whatever else is in the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from hdserve.engine.kernels.blocks import NUM_COLUMNS, fused_block, repeated, zeros
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, floats_at
from hdserve.engine.kernels.registers import NUM_LANES, NUM_ROWS
from hdserve.engine.kernels.vectors import load, prefetch, store_totals

OUTPUTS_AT_ONCE = NUM_COLUMNS
"""Outputs that are computed together; the number of outputs of a matrix is a multiple of it."""

_ROWS_PER_PANEL = 8 * NUM_ROWS
"""The rows that fit into the cache of the processor, and are multiplied while they are there."""


class Vectors(NamedTuple):
    """Operations for compiled code, of numbers of one kind.

    Attributes:
        num_lanes: of one vector.
        load: a vector of a row, or of the weights.
        with_products: see :func:`~hdserve.engine.kernels.blocks.with_products`.
        store_totals: takes the matrix, the place, the sums of four outputs, and the bias.
    """

    num_lanes: int
    load: Any
    with_products: Any
    store_totals: Any


def multiplier_of(tile: Callable[[int], Any], outputs_at_once: int) -> Any:
    """The product for compiled code: in tiles of ``NUM_ROWS`` rows, and a last one of fewer.

    Args:
        tile: makes the product of so many rows and ``outputs_at_once`` outputs for compiled code:
            a function of the rows, the weights, the bias, the products, the first row, and the
            first output and that behind the last one of the whole call.
    """
    multiply_several, multiply_three = tile(NUM_ROWS), tile(3)
    multiply_two, multiply_one = tile(2), tile(1)

    @inlined
    def multiply(rows: Any, weights: Any, bias: Any, products: Any, first: int, stop: int) -> None:
        num_rows = rows.shape[0]
        for panel in range(0, num_rows, _ROWS_PER_PANEL):
            end = min(panel + _ROWS_PER_PANEL, num_rows)
            num_left = (end - panel) % NUM_ROWS
            whole = end - num_left
            for n in range(first, stop, outputs_at_once):
                for m in range(panel, whole, NUM_ROWS):
                    multiply_several(rows, weights, bias, products, m, n, stop)
                if num_left == 1:
                    multiply_one(rows, weights, bias, products, whole, n, stop)
                elif num_left == 2:
                    multiply_two(rows, weights, bias, products, whole, n, stop)
                elif num_left == 3:
                    multiply_three(rows, weights, bias, products, whole, n, stop)

    return multiply


def _tile(num_rows: int, vectors: Vectors) -> Any:
    """The product of so many rows and four outputs."""
    num_lanes, load, with_products, store_totals = vectors
    zero_block = zeros(num_rows)

    @inlined
    def load_line(index: int, given: Any) -> Any:
        matrix, line, column = given
        return load(matrix, (line + index, column))

    @inlined
    def store_row(index: int, given: Any) -> Any:
        products, m, n, bias, block = given
        first = index * NUM_COLUMNS
        a, b, c, d = block[first], block[first + 1], block[first + 2], block[first + 3]
        return store_totals(products, (m + index, n), a, b, c, d, bias)

    load_rows, load_outputs = repeated(load_line, num_rows), repeated(load_line, NUM_COLUMNS)
    store_rows = repeated(store_row, num_rows)

    @inlined
    def multiply_tile(
        rows: Any, weights: Any, bias: Any, products: Any, m: int, n: int, stop: int
    ) -> None:
        """Meanwhile weights of the next outputs are read: of all four beside one row, else of two,
        since other rows ask for the rest."""
        ahead = min(n + OUTPUTS_AT_ONCE, stop - OUTPUTS_AT_ONCE)
        if num_rows == NUM_ROWS:
            ahead += m // NUM_ROWS % OUTPUTS_AT_ONCE
        block = zero_block()
        for k in range(0, rows.shape[1], num_lanes):
            outputs = load_outputs((weights, n, k))
            prefetch(weights, (ahead, k))
            prefetch(weights, (ahead ^ 2, k))
            if num_rows == 1:
                prefetch(weights, (ahead ^ 1, k))
                prefetch(weights, (ahead ^ 3, k))
            block = with_products(load_rows((rows, m, k)), outputs, block)
        store_rows((products, m, n, bias, block))

    return multiply_tile


def multiplier(vectors: Vectors) -> Any:
    """The multiplier for numbers of one kind, which sums each output across the lanes."""
    return multiplier_of(partial(_tile, vectors=vectors), OUTPUTS_AT_ONCE)


@inlined
def _store_totals(products: Any, indices: Any, a: Any, b: Any, c: Any, d: Any, _bias: Any) -> None:
    store_totals(products, indices, a, b, c, d)


_multiply = multiplier(Vectors(NUM_LANES, load, fused_block, _store_totals))


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
    """The outputs from ``first`` to ``stop``, both multiples of :data:`OUTPUTS_AT_ONCE`.

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
        _multiply(rows, weights, None, products, first, stop)
    else:
        floats = floats_at(weights_at, num_outputs, num_inputs)
        _multiply(rows, floats, None, products, first, stop)
