"""Attention of draft trees over the KV cache, for all sequences of a step in one call.

A row attends to a list of columns of its sequence, in the order of their positions: those of the
prompt and the answer so far, which are contiguous, and its own ancestors in the draft tree, which
are anywhere among the other nodes::

    position   0 ... prefix-1 | prefix ... visible-1
    column     0 ... prefix-1 | tails[first_tail], tails[first_tail + 1], ...

The contiguous columns are read for several queries at a time.  Neighbours of a prompt see more of
them than others, which give them no weight.

Scores, weights and the sum of values are computed in this order whatever else is in the call, with
operations whose rounding is fixed (:mod:`~hdserve.engine.kernels.vectors`), so a row gets the same
bits whether it is a draft among others or decoded by itself: by then its ancestors are contiguous,
but the list is the same.

Scores are kept for a few queries at a time.  Where the processor has AVX-512 BF16, the values of an
even position and the next are added together; which positions are paired depends on nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdserve.engine.kernels.attention_call import QUERIES_PER_TILE, Call, Tile, calls_of, query_at
from hdserve.engine.kernels.attention_numbers import SINGLE, Numbers
from hdserve.engine.kernels.attention_scores import KEYS_AT_ONCE, scores_of
from hdserve.engine.kernels.attention_values import NUMBERS_AT_ONCE, values_of
from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloat_matrices_at, float_matrices_at
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.softmax import fill, sink_of, softmax
from hdserve.engine.kernels.vectors import spread, store

_ZERO = np.float32(0.0)


@inlined
def _tile(call: Call, span: int, kv_head: int, first_query: int) -> Tile:
    first_row, num_rows, first_key = call.spans[span, 0], call.spans[span, 1], call.spans[span, 2]
    num_groups = call.queries.shape[1] // call.keys.shape[0]
    num_queries = min(QUERIES_PER_TILE, num_rows * num_groups - first_query)
    first = first_row + first_query // num_groups
    stop = first_row + (first_query + num_queries - 1) // num_groups + 1
    shared, low = call.rows[first, 0], call.rows[first, 2]
    for row in range(first, stop):
        shared = max(shared, call.rows[row, 0])
        low = min(low, call.rows[row, 2])
    origin = max(0, low - call.window) // NUM_LANES * NUM_LANES
    shared = origin + max(0, shared - origin) // KEYS_AT_ONCE * KEYS_AT_ONCE
    return Tile(first_row, first_query, num_queries, num_groups, kv_head, first_key, origin, shared)


def tile_attender(numbers: Numbers) -> Any:
    """Attention for the queries of a tile with one kind of numbers, as a function to compile."""
    scores_of_shared, scores_of_own = scores_of(numbers)
    values_of_shared, values_of_own = values_of(numbers)
    keep_weights = numbers.keep_weights

    def attend_tile(call: Call, tile: Tile) -> None:
        scores, shares = call.scores, call.scores.shape[1] - 1
        size = call.values.shape[2]
        num_shared_numbers = size // NUMBERS_AT_ONCE * NUMBERS_AT_ONCE
        scores_of_shared(call, tile)
        for place in range(tile.num_queries):
            query = query_at(tile, place)
            scores_of_own(call, tile, query)
            high = call.rows[query.row, 2] - tile.origin
            low = max(0, high - call.window)
            sink = sink_of(call.sinks, query.head)
            share = softmax(scores, place, low, high, call.scale, call.softcap, sink)
            stop = max(high, tile.stop - tile.origin)
            fill(scores, place, high, stop, _ZERO)
            keep_weights(call, place, stop)
            scores[place, shares] = share
            for d in range(0, size, NUM_LANES):
                store(call.attended, (query.row, query.head, d), spread(_ZERO))
        values_of_shared(call, tile, num_shared_numbers)
        for place in range(tile.num_queries):
            query = query_at(tile, place)
            for d in range(0, size, NUM_LANES):
                first = tile.stop if d < num_shared_numbers else tile.origin
                values_of_own(call, tile, query, first, d, scores[place, shares])

    return attend_tile


def attender(attend_tile: Any) -> Any:
    """Attention for a range of items, as a function for compiled code.

    Args:
        attend_tile: a compiled function of :func:`tile_attender`.
    """

    @inlined
    def attend_to(call: Call, first_item: int, stop_item: int) -> None:
        num_kv_heads = call.keys.shape[0]
        num_groups = call.queries.shape[1] // num_kv_heads
        for item in range(first_item, stop_item):
            span, kv_head = item // num_kv_heads, item % num_kv_heads
            num_queries = call.spans[span, 1] * num_groups
            for first_query in range(0, num_queries, QUERIES_PER_TILE):
                attend_tile(call, _tile(call, span, kv_head, first_query))

    return attend_to


_attend = attender(inlined(tile_attender(SINGLE)))
_float_call_at = calls_of(float_matrices_at, float_matrices_at)
_bfloat_call_at = calls_of(float_matrices_at, bfloat_matrices_at)


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

    Arrays are passed as addresses, which saves 20 us and can be called from C.

    Args:
        stored_at: int64 ``[6]``: addresses of the keys and of the values, and their four sizes, as
            in :class:`~hdserve.engine.kernels.attention_call.Call`: heads, rows, key size, value
            size.
        listed_at: int64 ``[6]``: addresses of spans, rows and tails, each followed by its length.
        queries_at, attended_at: those of the call, for ``num_heads``.
        scores_at: scratch for :data:`QUERIES_PER_TILE` times ``scores_size`` scores.
        is_bfloat16: 1 where keys and values are, 0 where they are float32.
        scale: of scores.
        softcap: bound of scores (Gemma 2); 0 for none.
        window: columns a row sees at most, itself included.
        sinks_at: float32 ``[num_heads]``, a score for each head that takes its share of attention
            and adds no value (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"); 0 for none.
    """
    places = stored_at, listed_at, queries_at, attended_at
    scores, terms = (scores_at, scores_size), (scale, softcap, window, sinks_at)
    if is_bfloat16:
        _attend(_bfloat_call_at(places, num_heads, scores, terms), first_item, stop_item)
    else:
        _attend(_float_call_at(places, num_heads, scores, terms), first_item, stop_item)
