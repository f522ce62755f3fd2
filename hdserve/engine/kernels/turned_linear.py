"""Products of rows with weights that were turned, both in bfloat16, by the processor's own products
of pairs.

A vector has a pair of inputs of many outputs, and meets the same pair of a row in all lanes::

    weights                      turned
    output 0   a0 a1 a2 a3       inputs 0, 1   a0 a1 | b0 b1 | ...
    output 1   b0 b1 b2 b3       inputs 2, 3   a2 a3 | b2 b3 | ...

So an output is a sum along one lane; in :mod:`~hdserve.engine.kernels.pair_linear` it is one across
all of them, which takes as long as the products where inputs are few.  A row comes out with the
same bits whatever else is in the product, but with others than there.
"""

from __future__ import annotations

from typing import Any, Final

from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated, zeros
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.linear import Part, multiplier_of
from hdserve.engine.kernels.memory import bfloats_at
from hdserve.engine.kernels.pairs import (
    NUM_PAIRED,
    fused_pairs,
    load_pairs,
    spread_pair,
    store_halves,
)
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import added, load

OUTPUTS_PER_BLOCK: Final = NUM_COLUMNS * NUM_LANES
"""Outputs that lie together; a matrix has at least as many."""

_PAIR = 2


@inlined
def _load_pair(index: int, given: Any) -> Any:
    rows, m, k = given
    return spread_pair(rows, (m + index, k))


@inlined
def _load_outputs(index: int, given: Any) -> Any:
    weights, line = given
    return load_pairs(weights, (line, index * NUM_PAIRED))


@inlined
def _store_sums(index: int, given: Any) -> None:
    products, m, n, bias, block = given
    column = n + index % NUM_COLUMNS * NUM_LANES
    sums = block[index]
    if bias.shape[0]:
        sums = added(sums, load(bias, (0, column)))
    store_halves(products, (m + index // NUM_COLUMNS, column), sums)


_load_all_outputs = repeated(_load_outputs, NUM_COLUMNS)


def _tile(num_rows: int) -> Any:
    """The product of so many rows and a block of outputs, which counts as one."""
    zero_block, load_rows = zeros(num_rows), repeated(_load_pair, num_rows)
    store_all = repeated(_store_sums, num_rows * NUM_COLUMNS)

    @inlined
    def multiply_tile(
        rows: Any, weights: Any, bias: Any, products: Any, _sums: Any, part: Part
    ) -> None:
        m, block = part.row, part.output
        n = min(block * OUTPUTS_PER_BLOCK, products.shape[1] - OUTPUTS_PER_BLOCK)
        first_line = block * rows.shape[1] // _PAIR
        sums = zero_block()
        for k in range(0, rows.shape[1], _PAIR):
            outputs = _load_all_outputs((weights, first_line + k // _PAIR))
            sums = fused_pairs(load_rows((rows, m, k)), outputs, sums)
        store_all((products, m, n, bias, sums))

    return multiply_tile


_multiply = multiplier_of(_tile, 1)


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
        weights_at: what :func:`~hdserve.engine.turned_linear.turn` made of the weights.
        bias_at: bfloat16 ``[num_outputs]``, or 0 for none.
        products_at: bfloat16 ``[num_rows, num_outputs]``, to be filled.
    """
    rows = bfloats_at(rows_at, num_rows, num_inputs)
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    lines = num_blocks * num_inputs // _PAIR
    weights = bfloats_at(weights_at, lines, _PAIR * OUTPUTS_PER_BLOCK)
    products = bfloats_at(products_at, num_rows, num_outputs)
    bias = bfloats_at(bias_at, min(bias_at, 1), num_outputs)
    _multiply(rows, weights, bias, products, first, stop)
