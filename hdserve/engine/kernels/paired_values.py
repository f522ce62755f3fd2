"""Weighted values of many queries, for values in bfloat16 that are laid out for them.

The numbers of two neighbouring positions are interleaved once for all queries of a tile, where
:mod:`~hdserve.engine.kernels.attention_values` does so for every four queries.  They are added in
the same order, so sums have the same bits.
"""

from __future__ import annotations

from typing import Any

from hdserve.engine.kernels.attention_call import Call, Tile, query_from
from hdserve.engine.kernels.attention_values import NUMBERS_AT_ONCE, load_sum, store_sum
from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.memory import stack_floats
from hdserve.engine.kernels.pairs import fused_pairs, load_in_turns, load_pairs, spread_pair
from hdserve.engine.kernels.registers import NUM_LANES, NUM_ROWS
from hdserve.engine.kernels.vectors import store

_PAIR = 2
_POSITIONS_AT_ONCE = 128

_scratch = stack_floats(_POSITIONS_AT_ONCE // _PAIR, NUMBERS_AT_ONCE)
_queries_from = repeated(query_from, NUM_ROWS)


@inlined
def _load_weight(index: int, given: Any) -> Any:
    call, queries, pair = given
    return spread_pair(call.words, (queries[index].place, pair))


@inlined
def _load_numbers(index: int, given: Any) -> Any:
    paired, pair = given
    return load_pairs(paired, (pair, index * NUM_LANES))


_load_weights = repeated(_load_weight, NUM_ROWS)
_load_values = repeated(_load_numbers, NUM_COLUMNS)
_load_sums = repeated(load_sum, NUM_ROWS * NUM_COLUMNS)
_store_sums = repeated(store_sum, NUM_ROWS * NUM_COLUMNS)


@inlined
def _lay_out(call: Call, tile: Tile, first: int, stop: int, d: int, paired: Any) -> None:
    """Interleave the numbers from ``d`` on of the positions from ``first`` on, two a row."""
    head = tile.kv_head
    for position in range(first, stop, _PAIR):
        kv_row, pair = tile.first_key + position, (position - first) // _PAIR
        for number in range(0, NUMBERS_AT_ONCE, NUM_LANES):
            one, other = (head, kv_row, d + number), (head, kv_row + 1, d + number)
            store(paired, (pair, number), load_in_turns(call.values, one, other))


@inlined
def _add_block(call: Call, tile: Tile, first: int, stop: int, d: int, paired: Any) -> None:
    first_pair = (first - tile.origin) // _PAIR
    for place in range(0, tile.num_queries, NUM_ROWS):
        queries = _queries_from((tile, place))
        block = _load_sums((call, queries, d))
        for pair in range((stop - first) // _PAIR):
            weights = _load_weights((call, queries, first_pair + pair))
            block = fused_pairs(weights, _load_values((paired, pair)), block)
        _store_sums((call, queries, d, block))


@inlined
def add_paired_values(call: Call, tile: Tile) -> int:
    """Add the weighted values of the columns of a tile, in whole :data:`NUMBERS_AT_ONCE`.

    Returns:
        The first column that is left.
    """
    num_numbers = call.values.shape[2] // NUMBERS_AT_ONCE * NUMBERS_AT_ONCE
    paired = _scratch()
    for first in range(tile.origin, tile.stop, _POSITIONS_AT_ONCE):
        stop = min(first + _POSITIONS_AT_ONCE, tile.stop)
        for d in range(0, num_numbers, NUMBERS_AT_ONCE):
            _lay_out(call, tile, first, stop, d, paired)
            _add_block(call, tile, first, stop, d, paired)
    return tile.stop
