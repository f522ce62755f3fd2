"""What attention on a GPU reads for each row of a forward, split into items of work (split-KV).

The positions that a row at position ``p`` of a sequence sees are split in two: a body, which never
contains drafts, and a tail, which ends with the row itself::

    position   0 ........................ | ............. p
               body, read from the cache  | tail, row by row
                                          a multiple of 16, for all p of 16 in a row

The split and the order of summation depend on ``p`` alone, wherever in the cache the row's
ancestors are.  Consecutive rows of a sequence form a tile: they read the same body, in splits whose
limits are the same positions for every sequence.  If the results of all splits would not fit into
their buffer, as with 64 sequences of 6,000 tokens, splits are larger.
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
"""Keys that are read at a time, and the most rows of the cache in a tail."""

STEP: Final = 16
"""Keys that a GPU multiplies at a time; bodies begin and end at multiples of it."""

MAX_DEPTH: Final = TAIL - 2 * STEP
"""The deepest draft."""

SPLIT: Final = 256
"""The positions in each of the first splits."""

SPLITS_PER_SIZE: Final = 8
"""After this many splits, the next ones are twice as large, so that there are never many."""

MAX_ROWS: Final = 256
"""The most rows of a forward."""

QUERIES: Final = 16
"""Queries that a GPU multiplies at a time, and those of a tile: its rows times the heads that share
keys."""

MAX_GROUPS: Final = 4
"""The most heads of one tile that share keys; further heads are in other tiles."""

TAILS_TOGETHER: Final = 4
"""Rows whose tails are one item of work."""

MAX_SPLITS: Final = 1024
"""How many results of splits and tails can be stored, for tiles of more than one item; at least two
for each row."""

MAX_ITEMS: Final = MAX_SPLITS + MAX_ROWS

NUM_ENTRIES: Final = MAX_ITEMS + 2
"""The entry before the first item, all items, and one that is read but not used."""

TAIL_SIZE, BODY_SIZE, ROW_POSITION = range(3)
"""The first fields of a row: the number of cache rows in its tail, the number of positions in its
body, and its own position."""

TAIL_ROWS: Final = 16
"""The first of the fields that list the cache rows of the tail."""

ROW_FIELDS: Final = TAIL_ROWS + TAIL

(
    TILE,
    TILE_ROW,
    TILE_ROWS,
    TILE_START,
    TILE_SLOT,
    TILE_SPLITS,
    TILE_ITEMS,
    SPLIT_NUMBER,
    SPLIT_FIRST,
    SPLIT_STOP,
    FIRST_TAIL,
    NUM_TAILS,
    SINGLE_STOP,
) = range(13)
"""The fields of an item.  Of its tile: number, first row, number of rows, cache row of position 0,
where its results are stored, how many splits, and how many items.  Of the split that the item
computes, if any: number, first position and last position plus one.  Of the tails that it computes:
the first row of the tile that has one of them, and their number.  Of an item that is all there is
to compute for a tree of one row: the row's position plus one, else 0; its tail follows its body in
the cache."""

ITEM_FIELDS: Final = 16

NUM_ITEMS, NUM_REAL_ROWS = range(2)
"""The fields of the entry before the first item: the number of items, and the number of rows that
are not padding."""

Fields = npt.NDArray[np.int32]


@inlined
def _first_position(split: int, shift: int) -> int:
    """The first position of a split."""
    doubled = split // SPLITS_PER_SIZE
    size = SPLIT << shift
    before = SPLITS_PER_SIZE * size * ((1 << doubled) - 1)
    return before + split % SPLITS_PER_SIZE * (size << doubled)


@inlined
def _num_splits(num_positions: int, shift: int) -> int:
    """The number of splits of this many positions; the last one may be shorter."""
    number, size = 0, SPLIT << shift
    while num_positions > SPLITS_PER_SIZE * size:
        num_positions -= SPLITS_PER_SIZE * size
        number, size = number + SPLITS_PER_SIZE, 2 * size
    return number + (num_positions + size - 1) // size


@inlined
def _body_size(position: int) -> int:
    """The number of positions in the body of the row at ``position``."""
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
def _longest_body(rows: Fields, first: int, num_rows: int) -> int:
    """The most positions in a body of ``num_rows`` rows from ``first``."""
    found = 0
    for row in range(first, first + num_rows):
        found = max(found, rows[row, BODY_SIZE])
    return found


@inlined
def _num_slots_of_tile(num_rows: int, num_splits: int) -> int:
    """The number of results that a tile of a tree of ``num_rows`` rows stores, one for each split
    and one for its tails.  A tree of one row with one split is one item, which stores none."""
    return 0 if num_rows == 1 and num_splits <= 1 else 1 + num_splits


@inlined
def _num_slots(chunks: npt.NDArray[np.int64], rows: Fields, rows_per_tile: int, shift: int) -> int:
    """The number of results all tiles store if splits have ``2 ** shift`` times their usual
    size."""
    number = 0
    for chunk in range(len(chunks)):
        first_row, num_rows = chunks[chunk, FIRST_ROW], chunks[chunk, NUM_ROWS]
        for first in range(0, num_rows, rows_per_tile):
            own_rows = min(rows_per_tile, num_rows - first)
            longest = _longest_body(rows, first_row + first, own_rows)
            number += _num_slots_of_tile(num_rows, _num_splits(longest, shift))
    return number


@entry_point
def list_items(
    chunks: npt.NDArray[np.int64], rows: Fields, rows_per_tile: int, items: Fields
) -> None:
    """Fill ``items [NUM_ENTRIES, ITEM_FIELDS]``: a tree of one row with one split is one item with
    its tail; otherwise each split and each group of tails is an item.

    Args:
        chunks: as of :func:`describe_tails`, of ``MAX_ROWS`` rows at most.
        rows: as it filled them.
    """
    shift = 0
    while _num_slots(chunks, rows, rows_per_tile, shift) > MAX_SPLITS:
        shift += 1
    number = tile = slot = 0
    for chunk in range(len(chunks)):
        num_rows = chunks[chunk, NUM_ROWS]
        for first in range(0, num_rows, rows_per_tile):
            first_row = chunks[chunk, FIRST_ROW] + first
            own_rows = min(rows_per_tile, num_rows - first)
            longest = _longest_body(rows, first_row, own_rows)
            splits = _num_splits(longest, shift)
            slots = _num_slots_of_tile(num_rows, splits)
            tails = (own_rows + TAILS_TOGETHER - 1) // TAILS_TOGETHER
            count = splits + tails if slots else 1
            for index in range(count):
                number += 1
                item = items[number]
                item[TILE], item[TILE_ROW], item[TILE_ROWS] = tile, first_row, own_rows
                item[TILE_START], item[TILE_SLOT] = chunks[chunk, SEGMENT_START], slot
                item[TILE_SPLITS], item[TILE_ITEMS] = splits, count
                item[SPLIT_NUMBER] = item[SPLIT_FIRST] = item[SPLIT_STOP] = 0
                item[FIRST_TAIL] = item[NUM_TAILS] = item[SINGLE_STOP] = 0
                if index < splits:
                    item[SPLIT_NUMBER] = index
                    item[SPLIT_FIRST] = _first_position(index, shift)
                    item[SPLIT_STOP] = min(longest, _first_position(index + 1, shift))
                if not slots:
                    item[SINGLE_STOP] = rows[first_row, ROW_POSITION] + 1
                elif index >= splits:
                    item[FIRST_TAIL] = (index - splits) * TAILS_TOGETHER
                    item[NUM_TAILS] = min(TAILS_TOGETHER, own_rows - item[FIRST_TAIL])
            tile += 1
            slot += slots
    items[0, NUM_ITEMS], items[0, NUM_REAL_ROWS] = number, 0
    if len(chunks):
        items[0, NUM_REAL_ROWS] = chunks[-1, FIRST_ROW] + chunks[-1, NUM_ROWS]
