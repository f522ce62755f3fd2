"""The attention of :mod:`~hdserve.engine.kernels.attention` in the tiles of the processor (AMX).

For keys and values in bfloat16.  Here, too, the order in which a row's numbers are added depends on
the row alone, though it is another order than there:

- a score is a product of tiles, which depends on its query and its key alone;
- weighted values of all but the last ``TAIL`` positions are added in blocks of 32 positions,
  counted from the beginning of the sequence, by products of tiles with weights rounded to bfloat16.
  Those positions are contiguous in the cache whether the row is decoded by itself or is a draft,
  as long as no draft is deeper than ``TAIL`` (for drafts up to 256 deeper, positions that are not
  contiguous are added one by one too; none may be deeper).  Rows of the tile that see less have
  weights of zero; values that no row weighs are set to zero, since zero times infinity is NaN;
- values of the last positions, which may be a draft's ancestors and be anywhere among the other
  drafts, are added one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels import tiles
from hdserve.engine.kernels.attention_call import Call, Tile, calls_of, query_at
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import (
    bfloat_matrices_at,
    bfloats_at,
    floats_at,
    word_matrices_at,
    words_at,
)
from hdserve.engine.kernels.pairs import load_in_turns, store_halves, store_pairs
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.softmax import sink_of, softmax
from hdserve.engine.kernels.tiles import NUM_SUMS, PAIRED, ROW_BYTES, TILE_ROWS
from hdserve.engine.kernels.transpose import store_transposed
from hdserve.engine.kernels.vectors import (
    fused,
    load,
    multiplied,
    prefetch,
    spread,
    store,
)

TAIL = 32
"""Positions of a row whose values are added one by one: the deepest draft there may be."""

NUMBERS_AT_ONCE = NUM_SUMS * NUM_LANES
"""The numbers of a value that are summed up at once."""

_LEFT_BYTES = TILE_ROWS * PAIRED * 2
_MAX_LAST = TAIL + 256
_ROWS_AHEAD = 32
"""How many keys and values ahead are prefetched."""
_ZERO = np.float32(0.0)

_clear_0, _clear_1, _clear_2, _clear_3 = tiles.clear_sums
_add_to_0, _add_to_1, _add_to_2, _add_to_3 = tiles.add_to_sums
_store_0, _store_1, _store_2, _store_3 = tiles.store_sums


def scratch_floats(key_size: int) -> int:
    """How many float32 of scratch a thread needs after its scores."""
    return (
        key_size // 2 * NUM_LANES
        + TILE_ROWS * NUM_LANES
        + (_LEFT_BYTES + NUM_SUMS * _LEFT_BYTES) // 4
        + TILE_ROWS * NUMBERS_AT_ONCE
        + TILE_ROWS * _MAX_LAST
    )


class _Scratch(NamedTuple):
    """The scratch memory of a thread.

    Attributes:
        asked: uint32 ``[key_size / 2, 16]``, the queries of a tile as columns.
        transposed: float32 ``[16, 16]``, scores of 16 keys.
        weights: uint16 ``[16, 32]``, of 16 queries for 32 positions.
        paired: uint16 ``[4 * 16, 32]``, the values of these positions.
        pairs: the same as float32 ``[4 * 16, 16]``.
        sums: float32 ``[16, 64]``.
        last: float32 ``[16, _MAX_LAST]``, the weights of the last positions.
    """

    asked: npt.NDArray[np.uint32]
    transposed: npt.NDArray[np.float32]
    weights: npt.NDArray[np.uint16]
    paired: npt.NDArray[np.uint16]
    pairs: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float32]
    last: npt.NDArray[np.float32]


@inlined
def _bound(call: Call, tile: Tile, place: int) -> int:
    """The position, counted from the origin, from which values are added one by one."""
    row = query_at(tile, place).row
    bound: int = min(call.rows[row, 0], call.rows[row, 2] - TAIL)
    return max(0, bound - tile.origin)


@inlined
def _ask(call: Call, scratch: _Scratch, tile: Tile) -> None:
    for place in range(tile.num_queries):
        query = query_at(tile, place)
        for word in range(call.queries.shape[2]):
            scratch.asked[word, place] = call.queries[query.row, query.head, word]


@inlined
def _score(call: Call, scratch: _Scratch, tile: Tile) -> None:
    """Compute the scores of all columns for the queries of the tile and for its padding."""
    stride = call.keys.shape[2] * 2
    for column in range(tile.origin, tile.stop, TILE_ROWS):
        tiles.clear_scores()
        for number in range(0, call.keys.shape[2], PAIRED):
            row = tile.first_key + column
            if tile.first_query == 0:
                for ahead in range(row + _ROWS_AHEAD, row + _ROWS_AHEAD + TILE_ROWS):
                    prefetch(call.keys, (tile.kv_head, ahead, number))
            tiles.load_left(call.keys, (tile.kv_head, row, number), stride)
            tiles.load_right(scratch.asked, (number // 2, 0), ROW_BYTES)
            tiles.add_to_scores()
        tiles.store_scores(scratch.transposed, (0, 0), ROW_BYTES)
        if tile.num_queries == 1:
            for key in range(TILE_ROWS):
                call.scores[0, column - tile.origin + key] = scratch.transposed[key, 0]
        else:
            store_transposed(scratch.transposed, (0, 0), call.scores, (0, column - tile.origin))


@inlined
def _weigh(call: Call, scratch: _Scratch, tile: Tile) -> None:
    """Transpose scores into weights by position.  The weights of the last positions move to
    ``last`` and leave zeros; one divided by the sum of all weights is stored after the scores."""
    scores, shares = call.scores, call.scores.shape[1] - 1
    stop = -(-_most(call, tile) // PAIRED) * PAIRED
    for place in range(tile.num_queries):
        _, row, head = query_at(tile, place)
        prefix, first_tail, visible = call.rows[row, 0], call.rows[row, 1], call.rows[row, 2]
        for index in range(visible - prefix):  # the column of a position is never before it
            column = call.tails[first_tail + index] - tile.origin
            scores[place, prefix - tile.origin + index] = scores[place, column]
        high = visible - tile.origin
        low = max(0, high - call.window)
        sink = sink_of(call.sinks, head)
        scores[place, shares] = softmax(scores, place, low, high, call.scale, call.softcap, sink)
        bound = _bound(call, tile, place)
        for index in range(high - bound):
            scratch.last[place, index] = scores[place, bound + index]
        for column in range(bound, max(stop, high)):
            scores[place, column] = _ZERO


@inlined
def _most(call: Call, tile: Tile) -> int:
    """The largest bound of the tile."""
    found = 0
    for place in range(tile.num_queries):
        found = max(found, _bound(call, tile, place))
    return found


@inlined
def _blank(scratch: _Scratch, num_positions: int) -> None:
    """Set the values of a block after the first ``num_positions`` positions to zero."""
    pair = num_positions // 2
    if num_positions % 2:
        for row in range(pair, NUM_SUMS * TILE_ROWS, TILE_ROWS):
            for number in range(1, PAIRED, 2):
                scratch.paired[row, number] = 0
        pair += 1
    for row in range(0, NUM_SUMS * TILE_ROWS, TILE_ROWS):
        for place in range(row + pair, row + TILE_ROWS):
            store(scratch.pairs, (place, 0), spread(_ZERO))


@inlined
def _add_block(
    call: Call, scratch: _Scratch, tile: Tile, block: int, num_weighed: int, first: int
) -> None:
    """Add the values of 32 positions, ``NUMBERS_AT_ONCE`` of each from ``first``, except those
    after the first ``num_weighed`` positions."""
    for place in range(tile.num_queries):
        for column in range(0, PAIRED, NUM_LANES):
            weights = load(call.scores, (place, block + column))
            store_halves(scratch.weights, (place, column), weights)
    key = tile.first_key + tile.origin + block
    for pair in range(TILE_ROWS):
        if tile.first_query == 0:
            for number in range(first, first + NUMBERS_AT_ONCE, PAIRED):
                prefetch(call.values, (tile.kv_head, key + 2 * pair + _ROWS_AHEAD, number))
                prefetch(call.values, (tile.kv_head, key + 2 * pair + _ROWS_AHEAD + 1, number))
        for n in range(NUM_SUMS):
            number = first + n * NUM_LANES
            one = (tile.kv_head, key + 2 * pair, number)
            other = (tile.kv_head, key + 2 * pair + 1, number)
            in_turns = load_in_turns(call.values, one, other)
            store_pairs(scratch.paired, (n * TILE_ROWS + pair, 0), in_turns)
    if block + PAIRED > num_weighed:
        _blank(scratch, num_weighed - block)
    tiles.load_left(scratch.weights, (0, 0), ROW_BYTES)
    tiles.load_right(scratch.paired, (0, 0), ROW_BYTES)
    _add_to_0()
    tiles.load_right(scratch.paired, (TILE_ROWS, 0), ROW_BYTES)
    _add_to_1()
    tiles.load_right(scratch.paired, (2 * TILE_ROWS, 0), ROW_BYTES)
    _add_to_2()
    tiles.load_right(scratch.paired, (3 * TILE_ROWS, 0), ROW_BYTES)
    _add_to_3()


@inlined
def _add_blocks(call: Call, scratch: _Scratch, tile: Tile, first: int) -> None:
    stride = NUMBERS_AT_ONCE * 4
    _clear_0()
    _clear_1()
    _clear_2()
    _clear_3()
    num_weighed = _most(call, tile)
    for block in range(0, num_weighed, PAIRED):
        _add_block(call, scratch, tile, block, num_weighed, first)
    _store_0(scratch.sums, (0, 0), stride)
    _store_1(scratch.sums, (0, NUM_LANES), stride)
    _store_2(scratch.sums, (0, 2 * NUM_LANES), stride)
    _store_3(scratch.sums, (0, 3 * NUM_LANES), stride)


@inlined
def _add_last(call: Call, scratch: _Scratch, tile: Tile, place: int, first: int) -> None:
    """Add the values of the last positions one by one, and divide by the sum of the weights."""
    _, row, head = query_at(tile, place)
    kv_head = tile.kv_head
    n0, n1, n2, n3 = 0, NUM_LANES, 2 * NUM_LANES, 3 * NUM_LANES
    a, b = load(scratch.sums, (place, n0)), load(scratch.sums, (place, n1))
    c, d = load(scratch.sums, (place, n2)), load(scratch.sums, (place, n3))
    prefix, first_tail, visible = call.rows[row, 0], call.rows[row, 1], call.rows[row, 2]
    bound = _bound(call, tile, place) + tile.origin
    for position in range(bound, visible):
        column = position
        if position >= prefix:
            column = call.tails[first_tail + position - prefix]
        key = tile.first_key + column
        weight = spread(scratch.last[place, position - bound])
        a = fused(weight, load(call.values, (kv_head, key, first + n0)), a)
        b = fused(weight, load(call.values, (kv_head, key, first + n1)), b)
        c = fused(weight, load(call.values, (kv_head, key, first + n2)), c)
        d = fused(weight, load(call.values, (kv_head, key, first + n3)), d)
    share = spread(call.scores[place, call.scores.shape[1] - 1])
    store(call.attended, (row, head, first + n0), multiplied(a, share))
    store(call.attended, (row, head, first + n1), multiplied(b, share))
    store(call.attended, (row, head, first + n2), multiplied(c, share))
    store(call.attended, (row, head, first + n3), multiplied(d, share))


@inlined
def _tile(call: Call, span: int, kv_head: int, first_query: int) -> Tile:
    first_row, num_rows, first_key = call.spans[span, 0], call.spans[span, 1], call.spans[span, 2]
    num_groups = call.queries.shape[1] // call.keys.shape[0]
    num_queries = min(TILE_ROWS, num_rows * num_groups - first_query)
    first = first_row + first_query // num_groups
    stop = first_row + (first_query + num_queries - 1) // num_groups + 1
    low, end = call.rows[first, 2], 0
    for row in range(first, stop):
        prefix, first_tail, visible = call.rows[row, 0], call.rows[row, 1], call.rows[row, 2]
        low = min(low, visible)
        end = max(end, prefix)
        if visible > prefix:
            end = max(end, call.tails[first_tail + visible - prefix - 1] + 1)
    origin = max(0, low - max(call.window, TAIL)) // PAIRED * PAIRED
    return Tile(first_row, first_query, num_queries, num_groups, kv_head, first_key, origin, end)


@inlined
def _attend(call: Call, scratch: _Scratch, first_item: int, stop_item: int) -> None:
    num_kv_heads = call.keys.shape[0]
    num_groups = call.queries.shape[1] // num_kv_heads
    for item in range(first_item, stop_item):
        span, kv_head = item // num_kv_heads, item % num_kv_heads
        for first_query in range(0, call.spans[span, 1] * num_groups, TILE_ROWS):
            tile = _tile(call, span, kv_head, first_query)
            _ask(call, scratch, tile)
            _score(call, scratch, tile)
            _weigh(call, scratch, tile)
            for first in range(0, call.values.shape[2], NUMBERS_AT_ONCE):
                _add_blocks(call, scratch, tile, first)
                for place in range(tile.num_queries):
                    _add_last(call, scratch, tile, place, first)


_call_at = calls_of(word_matrices_at, bfloat_matrices_at, TILE_ROWS, 2)


@entry_point
def attend_with_amx(
    stored_at: int,
    listed_at: int,
    queries_at: int,
    attended_at: int,
    num_heads: int,
    scores_at: int,
    scores_size: int,
    scale: float,
    softcap: float,
    window: int,
    sinks_at: int,
    first_item: int,
    stop_item: int,
) -> None:
    """Attend for items as :func:`~hdserve.engine.kernels.attention.attend` does.

    Args:
        queries_at: bfloat16, key size a multiple of 32 and value size 64.
        scores_at: scratch for :data:`TILE_ROWS` times ``scores_size`` scores and for
            :func:`scratch_floats`; faster if it begins at a cache line.
    """
    places = stored_at, listed_at, queries_at, attended_at
    scores, terms = (scores_at, scores_size), (scale, softcap, window, sinks_at)
    call = _call_at(places, num_heads, scores, terms)
    key_size = call.keys.shape[2]
    scratch_at = scores_at + TILE_ROWS * scores_size * 4
    transposed_at = scratch_at + key_size // 2 * NUM_LANES * 4
    weights_at = transposed_at + TILE_ROWS * NUM_LANES * 4
    paired_at = weights_at + _LEFT_BYTES
    sums_at = paired_at + NUM_SUMS * _LEFT_BYTES
    scratch = _Scratch(
        words_at(scratch_at, key_size // 2, NUM_LANES),
        floats_at(transposed_at, TILE_ROWS, NUM_LANES),
        bfloats_at(weights_at, TILE_ROWS, PAIRED),
        bfloats_at(paired_at, NUM_SUMS * TILE_ROWS, PAIRED),
        floats_at(paired_at, NUM_SUMS * TILE_ROWS, NUM_LANES),
        floats_at(sums_at, TILE_ROWS, NUMBERS_AT_ONCE),
        floats_at(sums_at + TILE_ROWS * NUMBERS_AT_ONCE * 4, TILE_ROWS, _MAX_LAST),
    )
    tiles.configure()
    _attend(call, scratch, first_item, stop_item)
    tiles.release()
