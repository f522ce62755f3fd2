"""Scores of many queries, for keys in bfloat16 that are transposed for them.

A vector has a pair of numbers of sixteen keys, multiplied with the same pair of a query::

    keys                  transposed
    key 0   a0 a1 a2 a3   numbers 0, 1   a0 a1 | b0 b1 | ...
    key 1   b0 b1 b2 b3   numbers 2, 3   a2 a3 | b2 b3 | ...

So no sum goes across a vector, as in :mod:`~hdserve.engine.kernels.attention_scores`.  Products are
added in the same order as there, where each lane adds up its own and then neighbouring lanes are
added until one is left: a score has the same bits either way.
"""

from __future__ import annotations

from typing import Any

from hdserve.engine.kernels.attention_call import Call, Tile, query_from
from hdserve.engine.kernels.blocks import repeated, zeros
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.memory import stack_floats
from hdserve.engine.kernels.pairs import NUM_PAIRED, fused_pairs, load_pairs, spread_pair
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.transpose import store_transposed
from hdserve.engine.kernels.vectors import added, prefetch, store

_PAIR = 2
_QUERIES_AT_ONCE = 2
_VECTORS_AT_ONCE = 2
_KEYS_AT_ONCE = _VECTORS_AT_ONCE * NUM_LANES
_NUM_SUMS = _QUERIES_AT_ONCE * _VECTORS_AT_ONCE
_MAX_KEY_SIZE = 256

_scratch = stack_floats(_MAX_KEY_SIZE // _PAIR, _KEYS_AT_ONCE)
_zero_block = zeros(_QUERIES_AT_ONCE, _VECTORS_AT_ONCE)
_queries_from = repeated(query_from, _QUERIES_AT_ONCE)


@inlined
def _load_query(index: int, given: Any) -> Any:
    call, queries, number = given
    return spread_pair(call.queries, (queries[index].row, queries[index].head, number))


@inlined
def _load_keys(index: int, given: Any) -> Any:
    transposed, pair = given
    return load_pairs(transposed, (pair, index * NUM_LANES))


@inlined
def _sum_at(index: int, given: Any) -> Any:
    return added(given[0][index], given[1][index])


@inlined
def _store_scores(index: int, given: Any) -> None:
    call, queries, column, block = given
    place = queries[index // _VECTORS_AT_ONCE].place
    store(call.scores, (place, column + index % _VECTORS_AT_ONCE * NUM_LANES), block[index])


_load_queries = repeated(_load_query, _QUERIES_AT_ONCE)
_load_all_keys = repeated(_load_keys, _VECTORS_AT_ONCE)
_sums_of = repeated(_sum_at, _NUM_SUMS)
_store_all = repeated(_store_scores, _NUM_SUMS)


@inlined
def _transpose_keys(call: Call, tile: Tile, column: int, transposed: Any) -> None:
    """Transpose the keys from a column on, and prefetch those after them."""
    first = tile.first_key + column
    for key in range(0, _KEYS_AT_ONCE, NUM_LANES):
        for number in range(0, call.keys.shape[2], NUM_PAIRED):
            corner = (tile.kv_head, first + key, number)
            for ahead in range(_KEYS_AT_ONCE, _KEYS_AT_ONCE + NUM_LANES):
                prefetch(call.keys, (tile.kv_head, first + key + ahead, number))
            store_transposed(call.keys, corner, transposed, (number // _PAIR, key))


@inlined
def _with_pair(call: Call, queries: Any, transposed: Any, number: int, block: Any) -> Any:
    found = _load_queries((call, queries, number))
    return fused_pairs(found, _load_all_keys((transposed, number // _PAIR)), block)


@inlined
def _four_lanes(call: Call, queries: Any, transposed: Any, first: int) -> Any:
    """The sum of four neighbouring lanes of each score, from the lane of number ``first``."""
    a, b, c, d = _zero_block(), _zero_block(), _zero_block(), _zero_block()
    for number in range(first, call.keys.shape[2], NUM_PAIRED):
        a = _with_pair(call, queries, transposed, number, a)
        b = _with_pair(call, queries, transposed, number + _PAIR, b)
        c = _with_pair(call, queries, transposed, number + 2 * _PAIR, c)
        d = _with_pair(call, queries, transposed, number + 3 * _PAIR, d)
    return _sums_of((_sums_of((a, b)), _sums_of((c, d))))


@inlined
def score_by_transposed_keys(call: Call, tile: Tile) -> int:
    """Compute the scores of the columns of a tile.

    Returns:
        The first column that is left.
    """
    if call.keys.shape[2] > _MAX_KEY_SIZE:
        return tile.origin
    transposed = _scratch()
    stop = tile.origin + (tile.stop - tile.origin) // _KEYS_AT_ONCE * _KEYS_AT_ONCE
    quarter = 4 * _PAIR
    for column in range(tile.origin, stop, _KEYS_AT_ONCE):
        _transpose_keys(call, tile, column, transposed)
        for place in range(0, tile.num_queries, _QUERIES_AT_ONCE):
            queries = _queries_from((tile, place))
            first = _four_lanes(call, queries, transposed, 0)
            third = _four_lanes(call, queries, transposed, 2 * quarter)
            second = _four_lanes(call, queries, transposed, quarter)
            fourth = _four_lanes(call, queries, transposed, 3 * quarter)
            sums = _sums_of((_sums_of((first, third)), _sums_of((second, fourth))))
            _store_all((call, queries, column - tile.origin, sums))
    return stop
