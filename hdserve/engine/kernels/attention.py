"""Attention of draft trees over the KV cache, for all sequences of a step in one call.

A row attends to a list of columns of its sequence, in the order of their positions: those it shares
with its neighbours, which lie beside each other, and its own ancestors in the draft tree, which lie
anywhere among the other nodes::

    position   0 ... prefix-1 | prefix ... visible-1
    column     0 ... prefix-1 | tails[first_tail], tails[first_tail + 1], ...

Scores, weights and the sum of values are computed in this order whatever else is in the call, with
operations whose rounding is fixed (:mod:`~hdserve.engine.kernels.vectors`), so a row comes out with
the same bits as a draft, among others, or decoded by itself: by then its ancestors lie beside each
other, but the list is the same.

Scores are kept for a few queries at a time and keys are read in blocks that stay in the cache of
the processor meanwhile, four queries at once, which share what is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.blocks import NUM_COLUMNS, fused_block, repeated, zeros
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import (
    bfloat_matrices_at,
    float_matrices_at,
    floats_at,
    integers_at,
)
from hdserve.engine.kernels.registers import NUM_LANES, NUM_ROWS
from hdserve.engine.kernels.vectors import (
    added,
    exponential,
    fused,
    larger,
    largest,
    load,
    multiplied,
    prefetch,
    spread,
    store,
    store_totals,
    tanh,
    total,
)

QUERIES_PER_TILE = 32
"""Queries whose scores are kept at a time."""

_QUERIES_AT_ONCE = NUM_ROWS
_KEYS_PER_BLOCK = 64
_KEYS_AT_ONCE = NUM_COLUMNS
_KEYS_AHEAD = 8
"""So far ahead keys and values are fetched into the cache."""

_NUMBERS_AT_ONCE = NUM_COLUMNS * NUM_LANES
"""Of a value."""

_ZERO, _ONE, _NOTHING = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


class Call(NamedTuple):
    """The arrays and the terms of one call.

    Attributes:
        queries: float32 ``[num_rows, num_heads, key_size]``.
        keys: ``[num_kv_heads, num_kv_rows, key_size]``, float32, or bfloat16 seen as uint16.
        values: ``[num_kv_heads, num_kv_rows, value_size]``, likewise.
        attended: float32 ``[num_rows, num_heads, value_size]``, to be filled.
        spans: int64 ``[num_sequences, 3]``: first row, number of rows, first KV row.
        rows: int64 ``[num_rows, 3]``: prefix, first tail, visible.
        tails: int64, columns.
        scores: float32 ``[QUERIES_PER_TILE, at least the most visible + 2 * NUM_LANES]``.
        scale, softcap, window: as :func:`attend` takes them, the first two in float32.
        sinks: float32 ``[1, num_heads]``, or ``[0, num_heads]`` where there are none.
    """

    queries: npt.NDArray[np.float32]
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    attended: npt.NDArray[np.float32]
    spans: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    tails: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    scale: Any
    softcap: Any
    window: int
    sinks: npt.NDArray[np.float32]


class _Tile(NamedTuple):
    """``num_queries`` queries from ``first_query`` of one sequence and one head of keys.

    All of them see the columns from ``origin``, a multiple of the lanes, to ``shared``, but for
    their windows.
    """

    first_row: int
    first_query: int
    num_queries: int
    num_groups: int
    kv_head: int
    first_key: int
    origin: int
    shared: int


class _Query(NamedTuple):
    """One head of one row, and its ``place`` in the tile."""

    place: int
    row: int
    head: int


@inlined
def _query(tile: _Tile, place: int) -> _Query:
    number = tile.first_query + place
    head = tile.kv_head * tile.num_groups + number % tile.num_groups
    return _Query(place, tile.first_row + number // tile.num_groups, head)


@inlined
def _kv_row(call: Call, tile: _Tile, row: int, position: int) -> int:
    """Where the key of ``position`` lies as ``row`` sees it; beyond the last one, that one."""
    prefix, first_tail, visible = call.rows[row, 0], call.rows[row, 1], call.rows[row, 2]
    column: int = min(position, visible - 1)
    if column >= prefix:
        column = call.tails[first_tail + column - prefix]
    return tile.first_key + column


@inlined
def _ask_for_keys(call: Call, tile: _Tile, key: int, d: int) -> None:
    for ahead in range(_KEYS_AHEAD, _KEYS_AHEAD + _KEYS_AT_ONCE):
        prefetch(call.keys, (tile.kv_head, key + ahead, d))


@inlined
def _query_from(index: int, given: tuple[_Tile, int]) -> _Query:
    """The query so many behind a place; beyond the last one, that one."""
    tile, place = given
    return _query(tile, min(place + index, tile.num_queries - 1))


@inlined
def _load_query(index: int, given: Any) -> Any:
    call, queries, d = given
    return load(call.queries, (queries[index].row, queries[index].head, d))


@inlined
def _load_key(index: int, given: Any) -> Any:
    call, tile, kv_rows, d = given
    return load(call.keys, (tile.kv_head, kv_rows[index], d))


@inlined
def _store_scores(index: int, given: Any) -> None:
    """Of one query for four keys."""
    call, queries, column, block = given
    first = index * NUM_COLUMNS
    a, b, c, d = block[first], block[first + 1], block[first + 2], block[first + 3]
    store_totals(call.scores, (queries[index].place, column), a, b, c, d)


_load_keys = repeated(_load_key, NUM_COLUMNS)


def _scorer(num_queries: int) -> Any:
    zero_block, load_queries = zeros(num_queries), repeated(_load_query, num_queries)
    store_all = repeated(_store_scores, num_queries)

    @inlined
    def score(call: Call, tile: _Tile, queries: Any, position: int, kv_rows: Any) -> None:
        """The scores of so many queries for four keys."""
        block = zero_block()
        for d in range(0, call.keys.shape[2], NUM_LANES):
            found = load_queries((call, queries, d))
            if queries[0].place == 0:
                _ask_for_keys(call, tile, kv_rows[0], d)
            block = fused_block(found, _load_keys((call, tile, kv_rows, d)), block)
        store_all((call, queries, position - tile.origin, block))

    return score


_queries_from = repeated(_query_from, NUM_ROWS)
_score_one, _score_several = _scorer(1), _scorer(NUM_ROWS)


@inlined
def _shared_scores(call: Call, tile: _Tile) -> None:
    for block in range(tile.origin, tile.shared, _KEYS_PER_BLOCK):
        stop = min(block + _KEYS_PER_BLOCK, tile.shared)
        for place in range(0, tile.num_queries, _QUERIES_AT_ONCE):
            queries = _queries_from((tile, place))
            is_alone = place + 1 == tile.num_queries
            for position in range(block, stop, _KEYS_AT_ONCE):
                key = tile.first_key + position
                kv_rows = (key, key + 1, key + 2, key + 3)
                if is_alone:
                    _score_one(call, tile, queries, position, kv_rows)
                else:
                    _score_several(call, tile, queries, position, kv_rows)


@inlined
def _own_scores(call: Call, tile: _Tile, query: _Query) -> None:
    for position in range(tile.shared, call.rows[query.row, 2], _KEYS_AT_ONCE):
        kv_rows = (
            _kv_row(call, tile, query.row, position),
            _kv_row(call, tile, query.row, position + 1),
            _kv_row(call, tile, query.row, position + 2),
            _kv_row(call, tile, query.row, position + 3),
        )
        _score_one(call, tile, (query,), position, kv_rows)


@inlined
def _fill(scores: Any, place: int, first: int, stop: int, value: Any) -> None:
    for column in range(first, stop):
        scores[place, column] = value


@inlined
def sink_of(sinks: Any, head: int) -> Any:
    """The score of what a head attends to besides; minus infinity where there is nothing."""
    return sinks[0, head] if sinks.shape[0] else _NOTHING


@inlined
def softmax(
    scores: Any, place: int, low: int, high: int, scale: Any, softcap: Any, sink: Any
) -> Any:
    """Scores to weights from ``low`` to ``high``, 0 on either side; one divided by their sum and
    the weight of ``sink``."""
    begin, end = low // NUM_LANES * NUM_LANES, -(-high // NUM_LANES) * NUM_LANES
    if softcap > _ZERO:
        for column in range(begin, end, NUM_LANES):
            score = multiplied(load(scores, (place, column)), spread(scale / softcap))
            store(scores, (place, column), multiplied(tanh(score), spread(softcap / scale)))
    _fill(scores, place, begin, low, _NOTHING)
    _fill(scores, place, high, end, _NOTHING)
    top = spread(_NOTHING)
    for column in range(begin, end, NUM_LANES):
        top = larger(top, load(scores, (place, column)))
    peak = scale * largest(top)
    if sink > peak:
        peak = sink
    steepness, shift = spread(scale), spread(-peak)
    weights = spread(_ZERO)
    for column in range(begin, end, NUM_LANES):
        weight = exponential(fused(load(scores, (place, column)), steepness, shift))
        store(scores, (place, column), weight)
        weights = added(weights, weight)
    _fill(scores, place, 0, low, _ZERO)
    _fill(scores, place, high, end, _ZERO)
    if sink > _NOTHING:
        return _ONE / (total(weights) + largest(exponential(spread(sink - peak))))
    return _ONE / total(weights)


@inlined
def _ask_for_values(call: Call, tile: _Tile, kv_row: int, d: int) -> None:
    for number in range(d, d + _NUMBERS_AT_ONCE, NUM_LANES):
        prefetch(call.values, (tile.kv_head, kv_row + _KEYS_AHEAD, number))


@inlined
def _load_sum(index: int, given: Any) -> Any:
    """What a query has attended to so far, four vectors each."""
    call, queries, d = given
    query = queries[index // NUM_COLUMNS]
    return load(call.attended, (query.row, query.head, d + index % NUM_COLUMNS * NUM_LANES))


@inlined
def _load_weight(index: int, given: Any) -> Any:
    call, queries, column = given
    return spread(call.scores[queries[index].place, column])


@inlined
def _load_value(index: int, given: Any) -> Any:
    call, tile, kv_row, d = given
    return load(call.values, (tile.kv_head, kv_row, d + index * NUM_LANES))


@inlined
def _store_sum(index: int, given: Any) -> None:
    call, queries, d, block = given
    query = queries[index // NUM_COLUMNS]
    place = (query.row, query.head, d + index % NUM_COLUMNS * NUM_LANES)
    store(call.attended, place, block[index])


_load_values = repeated(_load_value, NUM_COLUMNS)


def _summer(num_queries: int) -> Any:
    load_sums = repeated(_load_sum, num_queries * NUM_COLUMNS)
    store_sums = repeated(_store_sum, num_queries * NUM_COLUMNS)
    load_weights = repeated(_load_weight, num_queries)

    @inlined
    def sum_values(call: Call, tile: _Tile, queries: Any, first: int, stop: int, d: int) -> None:
        """Add the weighted values of the columns from ``first`` for so many queries."""
        block = load_sums((call, queries, d))
        for column in range(first, stop):
            weights = load_weights((call, queries, column - tile.origin))
            kv_row = tile.first_key + column
            if queries[0].place == 0:
                _ask_for_values(call, tile, kv_row, d)
            block = fused_block(weights, _load_values((call, tile, kv_row, d)), block)
        store_sums((call, queries, d, block))

    return sum_values


_sum_for_one, _sum_for_several = _summer(1), _summer(NUM_ROWS)


@inlined
def _shared_values(call: Call, tile: _Tile, num_shared_numbers: int) -> None:
    for block in range(tile.origin, tile.shared, _KEYS_PER_BLOCK):
        stop = min(block + _KEYS_PER_BLOCK, tile.shared)
        for place in range(0, tile.num_queries, _QUERIES_AT_ONCE):
            queries = _queries_from((tile, place))
            for d in range(0, num_shared_numbers, _NUMBERS_AT_ONCE):
                if place + 1 == tile.num_queries:
                    _sum_for_one(call, tile, queries, block, stop, d)
                else:
                    _sum_for_several(call, tile, queries, block, stop, d)


@inlined
def _own_values(call: Call, tile: _Tile, query: _Query, first: int, d: int, share: Any) -> None:
    """Add the weighted values from position ``first``, and divide by the sum of the weights."""
    attended = load(call.attended, (query.row, query.head, d))
    for position in range(first, call.rows[query.row, 2]):
        weight = spread(call.scores[query.place, position - tile.origin])
        kv_row = _kv_row(call, tile, query.row, position)
        attended = fused(weight, load(call.values, (tile.kv_head, kv_row, d)), attended)
    store(call.attended, (query.row, query.head, d), multiplied(attended, spread(share)))


@inlined
def _attend_tile(call: Call, tile: _Tile) -> None:
    scores, shares = call.scores, call.scores.shape[1] - 1
    size = call.values.shape[2]
    num_shared_numbers = size // _NUMBERS_AT_ONCE * _NUMBERS_AT_ONCE
    _shared_scores(call, tile)
    for place in range(tile.num_queries):
        query = _query(tile, place)
        _own_scores(call, tile, query)
        high = call.rows[query.row, 2] - tile.origin
        low = max(0, high - call.window)
        sink = sink_of(call.sinks, query.head)
        scores[place, shares] = softmax(scores, place, low, high, call.scale, call.softcap, sink)
        for d in range(0, size, NUM_LANES):
            store(call.attended, (query.row, query.head, d), spread(_ZERO))
    _shared_values(call, tile, num_shared_numbers)
    for place in range(tile.num_queries):
        query = _query(tile, place)
        for d in range(0, size, NUM_LANES):
            first = tile.shared if d < num_shared_numbers else tile.origin
            _own_values(call, tile, query, first, d, scores[place, shares])


@inlined
def _tile(call: Call, span: int, kv_head: int, first_query: int) -> _Tile:
    first_row, num_rows, first_key = call.spans[span, 0], call.spans[span, 1], call.spans[span, 2]
    num_groups = call.queries.shape[1] // call.keys.shape[0]
    num_queries = min(QUERIES_PER_TILE, num_rows * num_groups - first_query)
    first = first_row + first_query // num_groups
    stop = first_row + (first_query + num_queries - 1) // num_groups + 1
    shared, low = call.rows[first, 0], call.rows[first, 2]
    for row in range(first, stop):
        shared = min(shared, call.rows[row, 0])
        low = min(low, call.rows[row, 2])
    origin = max(0, low - call.window) // NUM_LANES * NUM_LANES
    shared = origin + max(0, shared - origin) // _KEYS_AT_ONCE * _KEYS_AT_ONCE
    return _Tile(
        first_row, first_query, num_queries, num_groups, kv_head, first_key, origin, shared
    )


@inlined
def _attend(call: Call, first_item: int, stop_item: int) -> None:
    num_kv_heads = call.keys.shape[0]
    num_groups = call.queries.shape[1] // num_kv_heads
    for item in range(first_item, stop_item):
        span, kv_head = item // num_kv_heads, item % num_kv_heads
        num_queries = call.spans[span, 1] * num_groups
        for first_query in range(0, num_queries, QUERIES_PER_TILE):
            _attend_tile(call, _tile(call, span, kv_head, first_query))


@entry_point
def attend(
    stored_at: int,
    listed_at: int,
    queries_at: int,
    attended_at: int,
    num_heads: int,
    scores_at: int,
    scores_size: int,
    is_bfloat16: int,
    scale: float,
    softcap: float,
    window: int,
    sinks_at: int,
    first_item: int,
    stop_item: int,
) -> None:
    """Attend for the items from ``first_item``; item ``i`` is head ``i % num_kv_heads`` of the
    keys of sequence ``i // num_kv_heads``.

    Arrays come as addresses, which takes 20 us less, and can be called from C.

    Args:
        stored_at: int64 ``[6]``: addresses of the keys and of the values, and their four sizes, as
            in :class:`Call`: heads, rows, of a key, of a value.
        listed_at: int64 ``[6]``: addresses of spans, rows and tails, each with its number.
        queries_at, attended_at: those of the call, for ``num_heads``.
        scores_at: room for :data:`QUERIES_PER_TILE` times ``scores_size`` scores.
        is_bfloat16: 1 where keys and values are, 0 where they are float32.
        scale: of scores.
        softcap: bound of scores (Gemma 2); 0 for none.
        window: columns a row sees at most, itself included.
        sinks_at: float32 ``[num_heads]``, a score for each head that takes its share of attention
            and gives nothing (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"); 0 for none.
    """
    stored, listed = integers_at(stored_at, 1, 6)[0], integers_at(listed_at, 1, 6)[0]
    num_kv_heads, num_kv_rows, key_size, value_size = stored[2], stored[3], stored[4], stored[5]
    num_rows = listed[3]
    queries = float_matrices_at(queries_at, num_rows, num_heads, key_size)
    attended = float_matrices_at(attended_at, num_rows, num_heads, value_size)
    spans, rows = integers_at(listed[0], listed[1], 3), integers_at(listed[2], num_rows, 3)
    tails = integers_at(listed[4], 1, listed[5])[0]
    scores = floats_at(scores_at, QUERIES_PER_TILE, scores_size)
    sinks = floats_at(sinks_at, min(sinks_at, 1), num_heads)
    terms = np.float32(scale), np.float32(softcap), window, sinks
    if is_bfloat16:
        keys = bfloat_matrices_at(stored[0], num_kv_heads, num_kv_rows, key_size)
        values = bfloat_matrices_at(stored[1], num_kv_heads, num_kv_rows, value_size)
        call = Call(queries, keys, values, attended, spans, rows, tails, scores, *terms)
        _attend(call, first_item, stop_item)
    else:
        keys32 = float_matrices_at(stored[0], num_kv_heads, num_kv_rows, key_size)
        values32 = float_matrices_at(stored[1], num_kv_heads, num_kv_rows, value_size)
        call32 = Call(queries, keys32, values32, attended, spans, rows, tails, scores, *terms)
        _attend(call32, first_item, stop_item)
