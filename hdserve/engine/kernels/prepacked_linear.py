"""Products of rows with weights that were prepacked (prepacked), both in bfloat16, by the
processor's own products of pairs.

A vector holds a pair of inputs of many outputs, and is multiplied with the same pair of a row in

    weights                      prepacked
    output 0   a0 a1 a2 a3       inputs 0, 1   a0 a1 | b0 b1 | ...
    output 1   b0 b1 b2 b3       inputs 2, 3   a2 a3 | b2 b3 | ...

So an output is a sum along one lane; in :mod:`~hdserve.engine.kernels.linear` it is one across all
lanes, which takes as long as the products if inputs are few.  A row gets the same bits whatever
else is in the product, but not the bits of the other kernel.

Few rows are multiplied with all inputs in one tile; somewhat more rows in tiles half as wide, if
weights were prepacked for those (:mod:`~hdserve.engine.kernels.narrow_tiles`).  Otherwise weights
are multiplied in blocks that fit into the L1 cache, and while all rows of a panel are multiplied
with one block, the next is prefetched (docs/adr/0034)::

                           inputs   block 0 | block 1 | ...
    outputs 0 to 63                 weights | weights |      each for all tiles of the panel
    tile 0 of the panel                sums -> sums   -> ...
    tile 1                             sums -> sums   -> ...
"""

from __future__ import annotations

from typing import Any, Final

from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, stack_floats
from hdserve.engine.kernels.narrow_tiles import can_multiply_narrowly, multiply_narrowly
from hdserve.engine.kernels.prepacked_tiles import (
    MAX_ROWS,
    NUMBERS_PER_LINE,
    OUTPUTS_PER_BLOCK,
    PAIR,
    Part,
    multiply_alone,
    multiply_one_of_several,
)

_FEW_ROWS: Final = 20
"""At most this many rows are multiplied faster than their weights are read from memory."""

INPUTS_PER_BLOCK: Final = 128
"""The most inputs of a block of weights for few rows.  It takes 16 KB: two of them fit into an L1
cache of 48 KB."""

MANY_INPUTS_PER_BLOCK: Final = 448
"""The same for more rows: their sums are stored and loaded less often."""

_MAX_ROWS_PER_PANEL: Final = 256
"""Multiplying this many rows with a block of weights takes longer than loading the next one."""

_stack_sums = stack_floats(_MAX_ROWS_PER_PANEL, OUTPUTS_PER_BLOCK)


@inlined
def _multiply_few(
    rows: Any, weights: Any, bias: Any, products: Any, num_streams: int, first: int, stop: int
) -> None:
    num_rows, num_inputs = rows.shape
    for block in range(first, stop):
        part = Part(0, 0, block, 0, num_inputs, 0, num_streams)
        multiply_alone(num_rows, (rows, weights, bias, products, None, part))


@inlined
def _multiply_many(
    rows: Any, weights: Any, bias: Any, products: Any, num_streams: int, first: int, stop: int
) -> None:
    num_rows, num_inputs = rows.shape
    sums = _stack_sums()
    num_words = num_inputs // PAIR
    num_panels = -(-num_rows // _MAX_ROWS_PER_PANEL)
    for panel_number in range(num_panels):
        panel = panel_number * num_rows // num_panels
        size = (panel_number + 1) * num_rows // num_panels - panel
        num_tiles = -(-size // MAX_ROWS)
        most_inputs = INPUTS_PER_BLOCK if size <= _FEW_ROWS else MANY_INPUTS_PER_BLOCK
        num_input_blocks = -(-num_inputs // most_inputs)
        for block in range(first, stop):
            for number in range(num_input_blocks):
                k = number * num_words // num_input_blocks * PAIR
                k_stop = (number + 1) * num_words // num_input_blocks * PAIR
                line = 0
                for tile in range(num_tiles):
                    num_own = (size + tile) // num_tiles
                    part = Part(panel + line, line, block, k, k_stop, tile, num_streams)
                    multiply_one_of_several(num_own, (rows, weights, bias, products, sums, part))
                    line += num_own


@entry_point
def multiply_prepacked_at(
    rows_at: int,
    weights_at: int,
    bias_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    num_streams: int,
    first: int,
    stop: int,
) -> None:
    """Compute the outputs of the blocks ``first`` to ``stop``.

    Args:
        rows_at: bfloat16 ``[num_rows, num_inputs]``, an even number of inputs.
        weights_at: the result of :func:`~hdserve.engine.linear.prepacked_weights.prepack`.
        bias_at: bfloat16 ``[num_outputs]``, or 0 for none.
        products_at: bfloat16 ``[num_rows, num_outputs]``, to be filled.
        num_streams: the number of streams that weights were prepacked for.
    """
    rows = bfloats_at(rows_at, num_rows, num_inputs)
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    weights = bfloats_at(weights_at, num_blocks * num_inputs, NUMBERS_PER_LINE)
    products = bfloats_at(products_at, num_rows, num_outputs)
    bias = bfloats_at(bias_at, min(bias_at, 1), num_outputs)
    if 0 < num_rows <= MAX_ROWS:
        _multiply_few(rows, weights, bias, products, num_streams, first, stop)
    elif can_multiply_narrowly(num_rows, num_inputs, num_streams):
        multiply_narrowly((rows, weights, bias, products), (first, stop))
    else:
        _multiply_many(rows, weights, bias, products, num_streams, first, stop)
