"""Scores of the queries of a tile.

Keys are read in blocks that stay in the processor's cache meanwhile; four queries at a time share
what is loaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hdserve.engine.kernels.attention_call import Call, Query, Tile, kv_row_of, query_from
from hdserve.engine.kernels.attention_numbers import Numbers
from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated, zeros
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_ROWS
from hdserve.engine.kernels.vectors import prefetch, store_totals

KEYS_AT_ONCE = NUM_COLUMNS
_KEYS_PER_BLOCK = 64
_KEYS_AHEAD = 8
"""How many keys ahead are prefetched."""

_queries_from = repeated(query_from, NUM_ROWS)


class Scores(NamedTuple):
    """Functions for compiled code that compute the scores of the columns of a tile, for all
    queries, and of those that each sees besides."""

    of_shared: Any
    of_own: Any


@inlined
def _store_scores(index: int, given: Any) -> None:
    """Store the scores of one query for four keys."""
    call, queries, column, block = given
    first = index * NUM_COLUMNS
    a, b, c, d = block[first], block[first + 1], block[first + 2], block[first + 3]
    store_totals(call.scores, (queries[index].place, column), a, b, c, d)


@inlined
def _ask_for_keys(call: Call, tile: Tile, key: int, d: int) -> None:
    for ahead in range(_KEYS_AHEAD, _KEYS_AHEAD + KEYS_AT_ONCE):
        prefetch(call.keys, (tile.kv_head, key + ahead, d))


def _scorer(num_queries: int, numbers: Numbers) -> Any:
    load, with_products, num_lanes = numbers.load, numbers.with_products, numbers.num_lanes
    zero_block, store_all = zeros(num_queries), repeated(_store_scores, num_queries)

    @inlined
    def load_query(index: int, given: Any) -> Any:
        call, queries, d = given
        return load(call.queries, (queries[index].row, queries[index].head, d))

    @inlined
    def load_key(index: int, given: Any) -> Any:
        call, tile, kv_rows, d = given
        return load(call.keys, (tile.kv_head, kv_rows[index], d))

    load_queries, load_keys = repeated(load_query, num_queries), repeated(load_key, NUM_COLUMNS)

    @inlined
    def score(call: Call, tile: Tile, queries: Any, position: int, kv_rows: Any) -> None:
        """The scores of several queries for four keys."""
        block = zero_block()
        for d in range(0, call.keys.shape[2], num_lanes):
            found = load_queries((call, queries, d))
            if queries[0].place == 0:
                _ask_for_keys(call, tile, kv_rows[0], d)
            block = with_products(found, load_keys((call, tile, kv_rows, d)), block)
        store_all((call, queries, position - tile.origin, block))

    return score


def scores_of(numbers: Numbers) -> Scores:
    """The functions that compute scores of one kind of numbers."""
    score_one, score_several = _scorer(1, numbers), _scorer(NUM_ROWS, numbers)
    score_together = numbers.score_together

    @inlined
    def of_shared(call: Call, tile: Tile) -> None:
        for block in range(score_together(call, tile), tile.stop, _KEYS_PER_BLOCK):
            stop = min(block + _KEYS_PER_BLOCK, tile.stop)
            for place in range(0, tile.num_queries, NUM_ROWS):
                queries = _queries_from((tile, place))
                is_alone = place + 1 == tile.num_queries
                for position in range(block, stop, KEYS_AT_ONCE):
                    key = tile.first_key + position
                    kv_rows = (key, key + 1, key + 2, key + 3)
                    if is_alone:
                        score_one(call, tile, queries, position, kv_rows)
                    else:
                        score_several(call, tile, queries, position, kv_rows)

    @inlined
    def of_own(call: Call, tile: Tile, query: Query) -> None:
        for position in range(tile.stop, call.rows[query.row, 2], KEYS_AT_ONCE):
            kv_rows = (
                kv_row_of(call, tile, query.row, position),
                kv_row_of(call, tile, query.row, position + 1),
                kv_row_of(call, tile, query.row, position + 2),
                kv_row_of(call, tile, query.row, position + 3),
            )
            score_one(call, tile, (query,), position, kv_rows)

    return Scores(of_shared, of_own)
