"""Where candidates are looked for: a place in a tree, its pointers, and the rows of the longest
contexts that each level knows there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.databases.history import MATCH_TOKENS, prefetch_places
from hdserve.databases.ngram import (
    COUNT_SHIFT,
    FIRST_SLOT,
    HASH_SEED,
    NUM_BUCKETS,
    Ints,
    Rows,
    extend_hash,
    find_row,
    prefetch_row,
    total_of,
)
from hdserve.drafting.arrays import (
    BIAS_INPUT,
    CELL_LOGIT,
    CELLS_PER_ROW,
    CONTEXT,
    HIT_CELL,
    HIT_INPUT,
    HIT_LEVEL,
    HIT_TOTAL,
    MAX_ORDER,
    MODEL,
    NODE_DEPTH,
    NUM_INPUTS,
    NUM_ORDERS,
    NUM_REACHES,
    NUM_SHARES,
    OTHERS,
    PRESENT_CELLS,
    RECYCLED,
    ROWS_PER_LEVEL,
    SHARED,
    STATE_CONTEXT_STAMP,
    STATISTICS,
    WHOLE,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.cells import row_kind, share_bucket, total_bucket
from hdserve.drafting.pointers import fill_suffix, predictions, refresh
from hdserve.drafting.vectors import copy_row


class Place(NamedTuple):
    """Where candidates are looked for: after a node of a tree, which for node 0 is the last token
    of the text.

    Attributes:
        levels: those that are searched, one bit each.
        num_suffix, num_shared: the lengths of the two rows of ``scratch.suffix``.
        pointers: the copy pointers.
        predicted: the tokens both point to; -1 for none.
        region: the weight set of depth and confidence.
    """

    levels: int
    num_suffix: int
    num_shared: int
    pointers: Ints
    predicted: tuple[int, int]
    region: int


class Table(NamedTuple):
    """The rows of a level, and how many of them are in use."""

    rows: Rows
    size: Ints
    level: int


@fast_inlined
def fill_hashes(scratch: Scratch, which: int, num_suffix: int) -> None:
    """The hash of each context length up to ``MAX_ORDER`` of one suffix."""
    value = HASH_SEED
    scratch.hashes[which, 0] = value
    for length in range(min(num_suffix, MAX_ORDER)):
        value = extend_hash(value, np.int64(scratch.suffix[which, length]))
        scratch.hashes[which, length + 1] = value


@fast_inlined
def prefetch_level(databases: Databases, scratch: Scratch, table: Table, num_shared: int) -> None:
    """Prefetch what :func:`find_level` will read."""
    for which in range(NUM_ORDERS):
        order = databases.orders[table.level, which]
        if order < 0 or order > num_shared:
            break
        prefetch_row(table.rows, table.size[NUM_BUCKETS], scratch.hashes[SHARED, order])


@fast_inlined
def find_level(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    place: Place,
    table: Table,
    num_hits: int,
) -> int:
    """Copy the rows of the longest known contexts of a level to ``scratch.rows``, longest first.

    Contexts in the request's own table reach into its prompt, those in the others do not.  Also
    sets the default evidence of candidates that a row lacks.

    Returns:
        The new number of hits.
    """
    rows, level, num_buckets = table.rows, table.level, table.size[NUM_BUCKETS]
    suffix, num_suffix, min_stamp = SHARED, place.num_shared, 0
    if level == CONTEXT:
        suffix, num_suffix = WHOLE, place.num_suffix
        min_stamp = databases.state[STATE_CONTEXT_STAMP]
    found = 0
    for which in range(NUM_ORDERS):
        order = databases.orders[level, which]
        if order < 0 or order > num_suffix:
            break
        row = find_row(rows, num_buckets, scratch.hashes[suffix, order], min_stamp)
        if row < 0:
            break
        scratch.found[found] = row
        found += 1
    scratch.reach[level] = min(found, NUM_REACHES - 1)
    for number in range(min(found, 1 if level == RECYCLED else ROWS_PER_LEVEL)):
        which = found - 1 - number
        row = scratch.found[which]
        copy_row(scratch.rows, num_hits, rows, row)
        total = max(1, total_of(rows, row))
        top = np.int64(rows[row, FIRST_SLOT] >> COUNT_SHIFT)
        kind = row_kind(level, which, total_bucket(total), number)
        share = share_bucket(np.float32(top) / np.float32(total))
        index = level * ROWS_PER_LEVEL + number
        cell = PRESENT_CELLS + kind * NUM_SHARES + share
        scratch.absent_cells[index] = cell
        scratch.template[0, index] = learned.cells[CELL_LOGIT, cell]
        scratch.hits[num_hits, HIT_INPUT] = index
        scratch.hits[num_hits, HIT_LEVEL] = level
        scratch.hits[num_hits, HIT_TOTAL] = total
        scratch.hits[num_hits, HIT_CELL] = kind * CELLS_PER_ROW
        num_hits += 1
    return num_hits


@fast_inlined
def table_of(databases: Databases, level: int) -> Table:
    """The table of a level.  If the level is a constant this costs nothing."""
    if level == CONTEXT:
        return Table(databases.context, databases.context_size, level)
    if level == MODEL:
        return Table(databases.model, databases.model_size, level)
    if level == OTHERS:
        return Table(databases.others, databases.others_size, level)
    if level == STATISTICS:
        return Table(databases.statistics, databases.statistics_size, level)
    return Table(databases.recycled, databases.recycled_size, level)


@fast_inlined
def prefetch_shared(databases: Databases, scratch: Scratch, levels: int, num_shared: int) -> None:
    """Prefetch the rows of the large tables."""
    if levels & (1 << STATISTICS):
        prefetch_level(databases, scratch, table_of(databases, STATISTICS), num_shared)
    if levels & (1 << MODEL):
        prefetch_level(databases, scratch, table_of(databases, MODEL), num_shared)
    if levels & (1 << OTHERS):
        prefetch_level(databases, scratch, table_of(databases, OTHERS), num_shared)
    if levels & (1 << RECYCLED):
        prefetch_level(databases, scratch, table_of(databases, RECYCLED), num_shared)


@fast_inlined
def arrive(
    databases: Databases,
    scratch: Scratch,
    levels: int,
    node: int,
    pointers: Ints,
    region: int,
    is_asked: bool,
) -> Place:
    """The place after a node: writes its suffixes and their hashes to ``scratch``, and moves its
    pointers on.

    Args:
        is_asked: whether the databases will be searched for candidates, so that their rows are
            prefetched.
    """
    num_suffix, num_shared = fill_suffix(databases, scratch, node)
    fill_hashes(scratch, WHOLE, num_suffix)
    fill_hashes(scratch, SHARED, num_shared)
    prefetch_places(databases.places, scratch.hashes[WHOLE, MATCH_TOKENS])
    prefetch_places(databases.model_places, scratch.hashes[SHARED, MATCH_TOKENS])
    if is_asked:
        prefetch_shared(databases, scratch, levels, num_shared)
    refresh(databases, scratch, pointers, levels, num_suffix, num_shared)
    depth = scratch.nodes[node, NODE_DEPTH]
    predicted = predictions(databases, scratch, pointers, depth, num_suffix)
    return Place(levels, num_suffix, num_shared, pointers, predicted, region)


@fast_inlined
def find_all(databases: Databases, learned: Learned, scratch: Scratch, place: Place) -> int:
    """The rows of all levels that are searched; returns the number of hits."""
    for index in range(NUM_INPUTS):
        scratch.template[0, index] = 0.0
        scratch.absent_cells[index] = -1
    scratch.template[0, BIAS_INPUT] = 1.0
    scratch.reach[:] = 0
    levels, num = place.levels, 0
    if levels & (1 << CONTEXT):
        num = find_level(databases, learned, scratch, place, table_of(databases, CONTEXT), num)
    if levels & (1 << MODEL):
        num = find_level(databases, learned, scratch, place, table_of(databases, MODEL), num)
    if levels & (1 << OTHERS):
        num = find_level(databases, learned, scratch, place, table_of(databases, OTHERS), num)
    if levels & (1 << STATISTICS):
        num = find_level(databases, learned, scratch, place, table_of(databases, STATISTICS), num)
    if levels & (1 << RECYCLED):
        num = find_level(databases, learned, scratch, place, table_of(databases, RECYCLED), num)
    return num
