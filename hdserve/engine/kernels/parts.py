"""What attention on a GPU reads for each row of a forward, and who does which part of it.

What row ``p`` of a sequence sees, in the order of positions, is a body, which drafts are never
part of, and a tail, which ends with the row itself::

    position   0 ........................ | ............. p
               body, as the cache has it  | tail, row by row
                                          a multiple of 16, for all p of 16 in a row

Both depend on ``p`` alone, wherever in the cache its ancestors are, and so does the order in which
they are summed up.  Rows of a sequence that follow one another are a tile: they read the same
body, in parts that begin and end at the same positions for every sequence.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.rows import (
    FIRST_COLUMN,
    FIRST_DRAFT,
    FIRST_ROW,
    NUM_ROWS,
    SEGMENT_START,
)

TAIL: Final = 64
"""Most rows of the cache that a tail has."""

STEP: Final = 16
"""Keys that a GPU multiplies at a time; as many begin and end a body."""

MAX_DEPTH: Final = TAIL - 2 * STEP
"""Of drafts."""

PART: Final = 64
"""Positions of the first parts."""

PARTS_OF_A_SIZE: Final = 32
"""So many parts, and the next ones have twice as many positions, so that there are never many."""

MAX_ROWS: Final = 256
"""Of a forward."""

ROWS_PER_TILE: Final = 16

MAX_PARTS: Final = 1024
"""Of all tiles, and a tail of each, for which there is room; at least two for each row."""

(
    TAIL_SIZE,
    BODY_SIZE,
    ROW_POSITION,
    TILE,
    PLACE,
    TILE_ROW,
    TILE_ROWS,
    TILE_START,
    TILE_SIZE,
    TILE_PARTS,
    FIRST_PART,
    TOTALS,
    TAIL_ROWS,
) = range(13)
"""Fields: of a row the rows of the cache in its tail, the positions of its body, its own position,
its tile and its place there; of a tile its first row and how many it has, the row of the cache of
position 0, the most positions of a body, the parts of that, and those of the tiles before; the
totals; and ``TAIL`` fields that list the tail of a row."""

NUM_FIELDS: Final = TAIL_ROWS + TAIL

NUM_PARTS, NUM_ITEMS, SHIFT = range(3)
"""Totals: parts of all tiles; these and the tails of all rows; and how often the size of parts is
doubled, so that there is room for what they find."""

NO_TILE: Final = 1 << 30
"""Parts before a tile that there is not."""

Fields = npt.NDArray[np.int32]


@inlined
def _num_parts(num_positions: int, shift: int) -> int:
    """Of so many positions, the last of them maybe not whole."""
    number, size = 0, PART << shift
    while num_positions > PARTS_OF_A_SIZE * size:
        num_positions -= PARTS_OF_A_SIZE * size
        number, size = number + PARTS_OF_A_SIZE, 2 * size
    return number + (num_positions + size - 1) // size


@inlined
def _body_size(position: int) -> int:
    return max(0, (position - MAX_DEPTH) // STEP * STEP)


@entry_point
def describe_parts(
    chunks: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int64],
    depths: npt.NDArray[np.int64],
    fields: Fields,
) -> None:
    """Fill ``fields [NUM_FIELDS, num_rows]`` for chunks that are trees, none deeper than
    ``MAX_DEPTH``, of ``MAX_ROWS`` rows together at most.

    Args:
        chunks, parents: see :func:`~hdserve.engine.kernels.rows.list_visible`.
        depths: see :func:`~hdserve.engine.kernels.rows.lay_out_rows`.
    """
    num_tiles = num_rows = 0
    for chunk in range(len(chunks)):
        start, column = chunks[chunk, SEGMENT_START], chunks[chunk, FIRST_COLUMN]
        first_row, number = chunks[chunk, FIRST_ROW], chunks[chunk, NUM_ROWS]
        first_draft = chunks[chunk, FIRST_DRAFT] - 1
        for first in range(0, number, ROWS_PER_TILE):
            own_rows = min(ROWS_PER_TILE, number - first)
            most = 0
            for node in range(first, first + own_rows):
                row = first_row + node
                position = column + (depths[first_draft + node] if node else 0)
                body = _body_size(position)
                most = max(most, body)
                fields[TAIL_SIZE, row], fields[BODY_SIZE, row] = position + 1 - body, body
                fields[ROW_POSITION, row] = position
                fields[TILE, row], fields[PLACE, row] = num_tiles, node - first
                at, ancestor = TAIL_ROWS + position - body, node
                while ancestor:
                    fields[at, row] = start + column + ancestor
                    at, ancestor = at - 1, parents[first_draft + ancestor]
                for index in range(at - TAIL_ROWS + 1):
                    fields[TAIL_ROWS + index, row] = start + body + index
            fields[TILE_ROW, num_tiles], fields[TILE_ROWS, num_tiles] = first_row + first, own_rows
            fields[TILE_START, num_tiles], fields[TILE_SIZE, num_tiles] = start, most
            num_tiles += 1
        num_rows = max(num_rows, first_row + number)
    _count_parts(num_tiles, num_rows, fields)


@inlined
def _count_parts(num_tiles: int, num_rows: int, fields: Fields) -> None:
    shift = total = 0
    while True:
        total = 0
        for tile in range(num_tiles):
            fields[TILE_PARTS, tile] = _num_parts(fields[TILE_SIZE, tile], shift)
            fields[FIRST_PART, tile] = total
            total += fields[TILE_PARTS, tile]
        if total + num_tiles <= MAX_PARTS:
            break
        shift += 1
    for tile in range(num_tiles, fields.shape[1]):
        fields[FIRST_PART, tile] = NO_TILE
    fields[TOTALS, NUM_PARTS], fields[TOTALS, NUM_ITEMS] = total, total + num_rows
    fields[TOTALS, SHIFT] = shift
