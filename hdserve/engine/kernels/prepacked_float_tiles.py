"""Tiles of the product of float32 rows with prepacked weights: some rows by a block of outputs, or
by half of one, which is one stream of weights."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from hdserve.engine.kernels.block_sums import loads_block, stores_block
from hdserve.engine.kernels.blocks import NUM_COLUMNS, fuses_rows, repeated, zeros
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.prepacked_tiles import (
    COLUMNS_PER_STREAM,
    MAX_STREAMS,
    first_output,
    steps,
    stores_products,
)
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import (
    load,
    load_high_halves,
    load_low_halves,
    prefetch,
    store,
    store_rounded_halves,
)

WORDS_PER_LINE: Final = COLUMNS_PER_STREAM * NUM_LANES
"""Words of weights in a cache line: those of half the outputs of a block."""

MAX_ROWS_OF_WHOLE: Final = 2
"""The most rows that are multiplied with a whole block at a time."""

_LINES_AHEAD: Final = 48
"""How far ahead a tile that is alone prefetches its weights."""


class Part(NamedTuple):
    """What a tile multiplies.

    Attributes:
        row: the first of the tile; ``line`` is the first row of its sums in those of the panel.
        block: of outputs.
        stream: the first of the tile.
        first, stop: the range of words.
        num_streams: in which the weights of a block are stored.
    """

    row: int
    line: int
    block: int
    stream: int
    first: int
    stop: int
    num_streams: int


class Kind(NamedTuple):
    """How compiled code reads the weights of one dtype and stores products of it.

    Attributes:
        loads: loads a vector of weights for each input of a word.
        store: stores a vector of products.
    """

    loads: tuple[Any, ...]
    store: Any


FLOAT32: Final = Kind((load,), store)
BFLOAT16: Final = Kind((load_low_halves, load_high_halves), store_rounded_halves)


@inlined
def _lines_ahead(part: Part, num_words: int, step: int) -> int:
    """How far away the words are that come next: in this block of outputs, or the next one."""
    if part.stop == num_words:
        return num_words * MAX_STREAMS - part.first * step
    return (part.stop - part.first) * step


def _loads_line(load_words: Any, num_columns: int) -> Any:
    """A function for compiled code that loads the weights of a word for a tile."""

    @inlined
    def load_column(index: int, given: Any) -> Any:
        weights, line, gap = given
        place = index % COLUMNS_PER_STREAM * NUM_LANES
        return load_words(weights, (line + index // COLUMNS_PER_STREAM * gap, place))

    return repeated(load_column, num_columns)


def _adds_word(kind: Kind, num_rows: int, num_columns: int) -> Any:
    """A function for compiled code that adds to sums the products of a word of weights."""
    fuse = fuses_rows(num_rows)
    load_first = _loads_line(kind.loads[0], num_columns)
    load_last = _loads_line(kind.loads[-1], num_columns)

    @inlined
    def add_float(rows: Any, row: int, word: int, line: Any, sums: Any) -> Any:
        return fuse(rows, row, word, load_first(line), sums)

    @inlined
    def add_pair(rows: Any, row: int, word: int, line: Any, sums: Any) -> Any:
        sums = fuse(rows, row, 2 * word, load_first(line), sums)
        return fuse(rows, row, 2 * word + 1, load_last(line), sums)

    return add_float if len(kind.loads) == 1 else add_pair


def _columns_of(num_rows: int) -> int:
    """The columns of a tile: those of a block, or of one stream."""
    return NUM_COLUMNS if num_rows <= MAX_ROWS_OF_WHOLE else COLUMNS_PER_STREAM


def tile(kind: Kind, num_rows: int, *, is_alone: bool) -> Any:
    """The product of ``num_rows`` rows and a block of weights, or one stream of it.  One of several
    tiles prefetches the block of words that comes next."""
    num_columns = _columns_of(num_rows)
    num_streams_read = num_columns // COLUMNS_PER_STREAM
    zero_sums, add_word = zeros(num_rows, num_columns), _adds_word(kind, num_rows, num_columns)
    load_sums = loads_block(num_rows, num_columns)
    store_sums = stores_block(num_rows, num_columns)
    store_products = stores_products(num_rows, num_columns, kind.store)
    inputs_per_word = len(kind.loads)

    @inlined
    def multiply_tile(given: Any) -> None:
        rows, weights, bias, products, sums, part = given
        num_words = rows.shape[1] // inputs_per_word
        step, gap = steps(part.num_streams, num_words)
        line = part.block * num_words * MAX_STREAMS + part.stream * gap + part.first * step
        column = part.stream * COLUMNS_PER_STREAM * NUM_LANES
        ahead = _lines_ahead(part, num_words, step) if not is_alone else _LINES_AHEAD
        found = zero_sums()
        if not is_alone and part.first:
            found = load_sums((sums, part.line, column))
        for word in range(part.first, part.stop):
            prefetch(weights, (line + ahead, 0))
            if num_streams_read == MAX_STREAMS:
                prefetch(weights, (line + gap + ahead, 0))
            found = add_word(rows, part.row, word, (weights, line, gap), found)
            line += step
        if not is_alone and part.stop < num_words:
            store_sums((sums, part.line, column, found))
        else:
            output = first_output(part.block, products) + column
            store_products((products, part.row, output, bias, found))

    return multiply_tile
