"""What attention on a GPU reads for each row of a forward, and who does which part of it.

What row ``p`` of a sequence sees, in the order of positions, is a body, which drafts are never
part of, and a tail, which ends with the row itself::

    position   0 ........................ | ............. p
               body, as the cache has it  | tail, row by row
                                          a multiple of 16, for all p of 16 in a row

Both depend on ``p`` alone, wherever in the cache its ancestors are, and so does the order in which
they are summed up.  Rows of a sequence that follow one another are a tile: they read the same
body, in parts that begin and end at the same positions for every sequence; larger ones where there
are so many that there would be no room for what they find, as with 64 sequences of 6,000 tokens.
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
"""Keys that are read at a time; a tail has no more rows of the cache."""

STEP: Final = 16
"""Keys that a GPU multiplies at a time; as many begin and end a body."""

MAX_DEPTH: Final = TAIL - 2 * STEP
"""Of drafts."""

PART: Final = 256
"""Positions of the first parts."""

PARTS_OF_A_SIZE: Final = 8
"""So many parts, and the next ones have twice as many positions, so that there are never many."""

MAX_ROWS: Final = 256
"""Of a forward."""

QUERIES: Final = 16
"""That a GPU multiplies at a time, and a tile has: rows times heads that share keys."""

MAX_GROUPS: Final = 4
"""Heads that share keys and are of a tile; others are of another one."""

TAILS_TOGETHER: Final = 4
"""Rows whose tails are one item of work."""

MAX_PARTS: Final = 1024
"""Of tiles that keep what they find, and their tails, for which there is room; at least two for
each row."""

MAX_ITEMS: Final = MAX_PARTS + MAX_ROWS

TAIL_SIZE, BODY_SIZE, ROW_POSITION = range(3)
"""Of a row: the rows of the cache in its tail, the positions of its body, and its own."""

TAIL_ROWS: Final = 16
"""Where a row's tail is listed."""

ROW_FIELDS: Final = TAIL_ROWS + TAIL

(
    TILE,
    TILE_ROW,
    TILE_ROWS,
    TILE_START,
    TILE_SLOT,
    TILE_PARTS,
    TILE_ITEMS,
    PART_NUMBER,
    PART_FIRST,
    PART_STOP,
    FIRST_TAIL,
    NUM_TAILS,
) = range(12)
"""Of an item: its tile, the first row of that and how many it has, the row of the cache of position
0, where what it finds is kept, how many parts the bodies have and how many items there are; which
part of the bodies this one is, if it is one, and its positions; and the rows of the tile whose
tails it is."""

ITEM_FIELDS: Final = 16

NUM_ITEMS, NUM_SLOTS, SHIFT, NUM_REAL_ROWS = range(4)
"""Of the entry before the first item: how many there are, the parts and tails of tiles that keep
what they find, and how often the size of parts is doubled, so that there is room for that; and the
rows that are no padding."""

Fields = npt.NDArray[np.int32]


@inlined
def _first_position(part: int, shift: int) -> int:
    """Of a part."""
    doubled = part // PARTS_OF_A_SIZE
    size = PART << shift
    before = PARTS_OF_A_SIZE * size * ((1 << doubled) - 1)
    return before + part % PARTS_OF_A_SIZE * (size << doubled)


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
def describe_tails(
    chunks: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int64],
    depths: npt.NDArray[np.int64],
    rows: Fields,
) -> None:
    """Fill ``rows [num_rows, ROW_FIELDS]`` for chunks that are trees, none deeper than
    ``MAX_DEPTH``.

    Args:
        chunks, parents: see :func:`~hdserve.engine.kernels.rows.list_visible`.
        depths: see :func:`~hdserve.engine.kernels.rows.lay_out_rows`.
    """
    for chunk in range(len(chunks)):
        start, column = chunks[chunk, SEGMENT_START], chunks[chunk, FIRST_COLUMN]
        first_draft = chunks[chunk, FIRST_DRAFT] - 1
        for node in range(chunks[chunk, NUM_ROWS]):
            row = chunks[chunk, FIRST_ROW] + node
            position = column + (depths[first_draft + node] if node else 0)
            body = _body_size(position)
            rows[row, TAIL_SIZE], rows[row, BODY_SIZE] = position + 1 - body, body
            rows[row, ROW_POSITION] = position
            at, ancestor = TAIL_ROWS + position - body, node
            while ancestor:
                rows[row, at] = start + column + ancestor
                at, ancestor = at - 1, parents[first_draft + ancestor]
            for index in range(at - TAIL_ROWS + 1):
                rows[row, TAIL_ROWS + index] = start + body + index


@inlined
def _slots_of_tile(num_rows: int, num_parts: int) -> int:
    """For what its parts and its tails find; a row with one part is one item, which keeps
    nothing."""
    return 0 if num_rows == 1 and num_parts <= 1 else 1 + num_parts


@inlined
def _num_slots(chunks: npt.NDArray[np.int64], rows: Fields, rows_per_tile: int, shift: int) -> int:
    """Of all tiles."""
    number = 0
    for chunk in range(len(chunks)):
        first_row, num_rows = chunks[chunk, FIRST_ROW], chunks[chunk, NUM_ROWS]
        for first in range(0, num_rows, rows_per_tile):
            own_rows = min(rows_per_tile, num_rows - first)
            most = 0
            for row in range(first, first + own_rows):
                most = max(most, rows[first_row + row, BODY_SIZE])
            number += _slots_of_tile(own_rows, _num_parts(most, shift))
    return number


@entry_point
def list_items(
    chunks: npt.NDArray[np.int64], rows: Fields, rows_per_tile: int, items: Fields
) -> None:
    """Fill ``items [1 + MAX_ITEMS, ITEM_FIELDS]``: for a single row with one part that one and its
    tail together, else each part and some tails at a time.

    Args:
        chunks: as of :func:`describe_tails`, of ``MAX_ROWS`` rows at most.
        rows: as it filled them.
    """
    shift = 0
    while _num_slots(chunks, rows, rows_per_tile, shift) > MAX_PARTS:
        shift += 1
    number = tile = slot = 0
    for chunk in range(len(chunks)):
        num_rows = chunks[chunk, NUM_ROWS]
        for first in range(0, num_rows, rows_per_tile):
            first_row = chunks[chunk, FIRST_ROW] + first
            own_rows = min(rows_per_tile, num_rows - first)
            most = 0
            for row in range(first_row, first_row + own_rows):
                most = max(most, rows[row, BODY_SIZE])
            parts = _num_parts(most, shift)
            slots = _slots_of_tile(own_rows, parts)
            tails = (own_rows + TAILS_TOGETHER - 1) // TAILS_TOGETHER
            count = parts + tails if slots else 1
            for index in range(count):
                number += 1
                item = items[number]
                item[TILE], item[TILE_ROW], item[TILE_ROWS] = tile, first_row, own_rows
                item[TILE_START], item[TILE_SLOT] = chunks[chunk, SEGMENT_START], slot
                item[TILE_PARTS], item[TILE_ITEMS] = parts, count
                item[PART_NUMBER] = item[PART_FIRST] = item[PART_STOP] = 0
                item[FIRST_TAIL] = item[NUM_TAILS] = 0
                if index < parts:
                    item[PART_NUMBER] = index
                    item[PART_FIRST] = _first_position(index, shift)
                    item[PART_STOP] = min(most, _first_position(index + 1, shift))
                if not slots:
                    item[NUM_TAILS] = 1
                elif index >= parts:
                    item[FIRST_TAIL] = (index - parts) * TAILS_TOGETHER
                    item[NUM_TAILS] = min(TAILS_TOGETHER, own_rows - item[FIRST_TAIL])
            tile += 1
            slot += slots
    items[0, NUM_ITEMS], items[0, NUM_SLOTS], items[0, SHIFT] = number, slot, shift
    items[0, NUM_REAL_ROWS] = 0
    if len(chunks):
        items[0, NUM_REAL_ROWS] = chunks[-1, FIRST_ROW] + chunks[-1, NUM_ROWS]
