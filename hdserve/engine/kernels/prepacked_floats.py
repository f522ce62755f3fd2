"""Products of rows with prepacked weights in vectors of float32, on processors with AVX2 alone.

As in :mod:`~hdserve.engine.kernels.prepacked_linear` an output is a sum along one lane, made in
order of the inputs, so a row gets the same bits whatever else is in the product.  A vector holds
32 bits of each of 8 outputs: a float32, or the bfloat16 of two inputs, each widened by one
instruction.

There are 16 registers.  One or two rows are multiplied with a whole block of outputs at a time,
three to six with half a block, which is one stream of weights::

                   vectors of weights                       registers: sums, weights, row
    1 or 2 rows    stream 0: a b  and   stream 1: c d       8 + 4 + 1
    3 to 6 rows    stream 0: a b, then  stream 1: c d       12 + 2 + 1

More rows are divided into tiles of up to six, which are multiplied with blocks of weights that fit
into the L1 cache; between two blocks the sums of a panel of rows are in memory.
"""

from __future__ import annotations

from typing import Any, Final

from hdserve.engine.kernels.blocks import chosen
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, floats_at, stack_floats, words_at
from hdserve.engine.kernels.prepacked_float_tiles import (
    BFLOAT16,
    FLOAT32,
    MAX_ROWS_OF_WHOLE,
    WORDS_PER_LINE,
    Kind,
    Part,
    tile,
)
from hdserve.engine.kernels.prepacked_tiles import (
    FEWEST_OF_SEVERAL,
    MAX_ROWS,
    MAX_STREAMS,
    OUTPUTS_PER_BLOCK,
)
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import load, store

WORDS_PER_BLOCK: Final = 64
"""Words of an output in a block of weights, which takes 8 KB: two of them fit into an L1 cache of
32 KB, with a tile of rows."""

_MAX_ROWS_PER_PANEL: Final = 252
MAX_INPUTS: Final = 1 << 17
"""The most numbers of rows that are widened together, in 512 KB on the stack."""

_stack_sums = stack_floats(_MAX_ROWS_PER_PANEL, OUTPUTS_PER_BLOCK)
_stack_rows = stack_floats(1, MAX_INPUTS)


def _multiplies_few(kind: Kind) -> Any:
    """The product of up to ``MAX_ROWS`` float32 rows and prepacked weights for compiled code."""
    multiply_tile = chosen(
        {number: tile(kind, number, is_alone=True) for number in range(1, MAX_ROWS + 1)}
    )
    inputs_per_word = len(kind.loads)

    @inlined
    def multiply(given: Any, num_streams: int, first: int, stop: int) -> None:
        rows, weights, bias, products = given
        num_rows, num_inputs = rows.shape
        step = MAX_STREAMS if num_rows <= MAX_ROWS_OF_WHOLE else 1
        for block in range(first, stop):
            for stream in range(0, MAX_STREAMS, step):
                part = Part(0, 0, block, stream, 0, num_inputs // inputs_per_word, num_streams)
                multiply_tile(num_rows, (rows, weights, bias, products, None, part))

    return multiply


def _multiplies_many(kind: Kind) -> Any:
    """The product of more rows."""
    multiply_tile = chosen(
        {
            number: tile(kind, number, is_alone=False)
            for number in range(FEWEST_OF_SEVERAL, MAX_ROWS + 1)
        }
    )
    inputs_per_word = len(kind.loads)

    @inlined
    def multiply(given: Any, num_streams: int, first: int, stop: int) -> None:
        rows, weights, bias, products = given
        num_rows, num_words = rows.shape[0], rows.shape[1] // inputs_per_word
        sums = _stack_sums()
        num_panels = -(-num_rows // _MAX_ROWS_PER_PANEL)
        for number in range(num_panels):
            panel = number * num_rows // num_panels
            size = (number + 1) * num_rows // num_panels - panel
            num_tiles = -(-size // MAX_ROWS)
            for block in range(first, stop):
                for word in range(0, num_words, WORDS_PER_BLOCK):
                    word_stop = min(word + WORDS_PER_BLOCK, num_words)
                    line = 0
                    for index in range(num_tiles):
                        num_own = (size + index) // num_tiles
                        for stream in range(MAX_STREAMS):
                            row = panel + line
                            part = Part(row, line, block, stream, word, word_stop, num_streams)
                            multiply_tile(num_own, (rows, weights, bias, products, sums, part))
                        line += num_own

    return multiply


def _multiplies(kind: Kind) -> Any:
    """The product of any number of rows."""
    multiply_few, multiply_many = _multiplies_few(kind), _multiplies_many(kind)

    @inlined
    def multiply(given: Any, num_streams: int, first: int, stop: int) -> None:
        if 0 < given[0].shape[0] <= MAX_ROWS:
            multiply_few(given, num_streams, first, stop)
        else:
            multiply_many(given, num_streams, first, stop)

    return multiply


_multiply_floats, _multiply_pairs = _multiplies(FLOAT32), _multiplies(BFLOAT16)


@entry_point
def multiply_prepacked_floats_at(
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
    """Compute the outputs of the blocks ``first`` to ``stop``, all in float32.

    Args:
        rows_at: ``[num_rows, num_inputs]``.
        weights_at: the result of :func:`~hdserve.engine.linear.prepacked_weights.prepack`.
        bias_at: ``[num_outputs]``, or 0 for none.
        products_at: ``[num_rows, num_outputs]``, to be filled.
        num_streams: the number of streams that weights were prepacked for.
    """
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    rows = floats_at(rows_at, num_rows, num_inputs)
    weights = floats_at(weights_at, num_blocks * num_inputs * MAX_STREAMS, WORDS_PER_LINE)
    bias = floats_at(bias_at, min(bias_at, 1), num_outputs)
    products = floats_at(products_at, num_rows, num_outputs)
    _multiply_floats((rows, weights, bias, products), num_streams, first, stop)


@inlined
def _widen(rows: Any, first: int, widened: Any) -> None:
    """Fill ``widened`` with the rows from ``first`` on, in float32."""
    for row in range(widened.shape[0]):
        for k in range(0, widened.shape[1], NUM_LANES):
            store(widened, (row, k), load(rows, (first + row, k)))


@entry_point
def multiply_prepacked_pairs_at(
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
    """The same in bfloat16, the inputs a multiple of the lanes; sums are float32."""
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    rows = bfloats_at(rows_at, num_rows, num_inputs)
    weights = words_at(weights_at, num_blocks * num_inputs, WORDS_PER_LINE)
    bias = bfloats_at(bias_at, min(bias_at, 1), num_outputs)
    memory = _stack_rows()
    num_panels = -(-num_rows // min(_MAX_ROWS_PER_PANEL, MAX_INPUTS // num_inputs))
    for number in range(num_panels):
        panel = number * num_rows // num_panels
        size = (number + 1) * num_rows // num_panels - panel
        widened = floats_at(memory.ctypes.data, size, num_inputs)
        _widen(rows, panel, widened)
        products = bfloats_at(products_at + 2 * panel * num_outputs, size, num_outputs)
        _multiply_pairs((widened, weights, bias, products), num_streams, first, stop)
