"""The weighted values of the queries of a tile, added up to the attention output."""

from __future__ import annotations

from typing import Any, NamedTuple

from hdserve.engine.kernels.attention_call import Call, Query, Tile, kv_row_of, query_from
from hdserve.engine.kernels.attention_numbers import Numbers
from hdserve.engine.kernels.blocks import NUM_COLUMNS, repeated
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_LANES, NUM_ROWS
from hdserve.engine.kernels.vectors import load, multiplied, prefetch, spread, store

NUMBERS_AT_ONCE = NUM_COLUMNS * NUM_LANES
"""The numbers of a value that are summed up at once."""

_VALUES_PER_BLOCK = 64
_VALUES_AHEAD = 8
"""How many values ahead are prefetched."""

_queries_from = repeated(query_from, NUM_ROWS)


class Values(NamedTuple):
    """Functions for compiled code that add the values of the columns of a tile, in whole
    :data:`NUMBERS_AT_ONCE`, and for one query those from a position on."""

    of_shared: Any
    of_own: Any


@inlined
def load_sum(index: int, given: Any) -> Any:
    """The sums of a query so far, four vectors each."""
    call, queries, d = given
    query = queries[index // NUM_COLUMNS]
    return load(call.attended, (query.row, query.head, d + index % NUM_COLUMNS * NUM_LANES))


@inlined
def store_sum(index: int, given: Any) -> None:
    """Store one of these vectors."""
    call, queries, d, block = given
    query = queries[index // NUM_COLUMNS]
    place = (query.row, query.head, d + index % NUM_COLUMNS * NUM_LANES)
    store(call.attended, place, block[index])


def _summer(num_queries: int, numbers: Numbers) -> Any:
    with_products, num_positions = numbers.with_products, numbers.num_positions
    num_lanes, load_one, load_value = numbers.num_lanes, numbers.load_weight, numbers.load_value
    load_sums = repeated(load_sum, num_queries * NUM_COLUMNS)
    store_sums = repeated(store_sum, num_queries * NUM_COLUMNS)

    @inlined
    def load_weight(index: int, given: Any) -> Any:
        call, queries, column = given
        return load_one(call, queries[index].place, column)

    @inlined
    def load_numbers(index: int, given: Any) -> Any:
        call, tile, kv_row, d = given
        number = d + index * NUM_LANES
        first, second = (tile.kv_head, kv_row, number), (tile.kv_head, kv_row + 1, number)
        return load_value(call.values, first, second)

    @inlined
    def ask_for_values(call: Call, tile: Tile, kv_row: int, d: int) -> None:
        for ahead in range(kv_row + _VALUES_AHEAD, kv_row + _VALUES_AHEAD + num_positions):
            for number in range(d, d + NUMBERS_AT_ONCE, num_lanes):
                prefetch(call.values, (tile.kv_head, ahead, number))

    load_weights = repeated(load_weight, num_queries)
    load_values = repeated(load_numbers, NUM_COLUMNS)

    @inlined
    def sum_values(call: Call, tile: Tile, queries: Any, first: int, stop: int, d: int) -> None:
        """Add the weighted values of the columns from ``first`` for several queries."""
        block = load_sums((call, queries, d))
        for column in range(first, stop, num_positions):
            weights = load_weights((call, queries, column - tile.origin))
            kv_row = tile.first_key + column
            if queries[0].place == 0:
                ask_for_values(call, tile, kv_row, d)
            block = with_products(weights, load_values((call, tile, kv_row, d)), block)
        store_sums((call, queries, d, block))

    return sum_values


def values_of(numbers: Numbers) -> Values:
    """The functions that sum up values of one kind of numbers."""
    sum_for_one, sum_for_several = _summer(1, numbers), _summer(NUM_ROWS, numbers)
    with_products, num_positions = numbers.with_products, numbers.num_positions
    load_weight, load_value = numbers.load_weight, numbers.load_value
    add_together = numbers.add_together

    @inlined
    def of_shared(call: Call, tile: Tile, num_shared_numbers: int) -> None:
        for block in range(add_together(call, tile), tile.stop, _VALUES_PER_BLOCK):
            stop = min(block + _VALUES_PER_BLOCK, tile.stop)
            for place in range(0, tile.num_queries, NUM_ROWS):
                queries = _queries_from((tile, place))
                for d in range(0, num_shared_numbers, NUMBERS_AT_ONCE):
                    if place + 1 == tile.num_queries:
                        sum_for_one(call, tile, queries, block, stop, d)
                    else:
                        sum_for_several(call, tile, queries, block, stop, d)

    @inlined
    def of_own(call: Call, tile: Tile, query: Query, first: int, d: int, share: Any) -> None:
        """Add the values from ``first`` on for one query, and divide by the sum of the weights."""
        head = tile.kv_head
        block = (load(call.attended, (query.row, query.head, d)),)
        for position in range(first, call.rows[query.row, 2], num_positions):
            weight = load_weight(call, query.place, position - tile.origin)
            a = kv_row_of(call, tile, query.row, position)
            b = kv_row_of(call, tile, query.row, position + 1) if num_positions > 1 else a
            value = load_value(call.values, (head, a, d), (head, b, d))
            block = with_products((weight,), (value,), block)
        store(call.attended, (query.row, query.head, d), multiplied(block[0], spread(share)))

    return Values(of_shared, of_own)
