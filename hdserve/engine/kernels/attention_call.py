"""The arguments of a call of attention: its arrays, the queries of a tile, and where keys are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.memory import float_matrices_at, floats_at, integers_at, words_at

QUERIES_PER_TILE = 32
"""Queries whose scores are kept at a time."""

MANY_QUERIES = 16
"""From this many on it pays to lay out keys and values for a tile's queries (docs/adr/0017)."""


class Call(NamedTuple):
    """The arrays and parameters of one call.

    Attributes:
        queries: ``[num_rows, num_heads, key_size]``, float32, or bfloat16: viewed as uint16 where
            they are multiplied in pairs, and two as one uint32 where they are in tiles.
        keys: ``[num_kv_heads, num_kv_rows, key_size]``, float32, or bfloat16 viewed as uint16.
        values: ``[num_kv_heads, num_kv_rows, value_size]``, likewise.
        attended: float32 ``[num_rows, num_heads, value_size]``, to be filled.
        spans: int64 ``[num_sequences, 3]``: first row, number of rows, first KV row.
        rows: int64 ``[num_rows, 3]``: prefix, first tail, visible.
        tails: int64, columns.
        scores: float32 ``[QUERIES_PER_TILE, at least the most visible + 2 * NUM_LANES]``; in tiles
            ``[TILE_ROWS, at least the columns of a sequence + 2 * PAIRED]``.
        words: the memory of the scores, as uint32.
        scale, softcap, window: as :func:`~hdserve.engine.kernels.attention.attend` takes them, the
            first two in float32.
        sinks: float32 ``[1, num_heads]``, or ``[0, num_heads]`` where there are none.
    """

    queries: npt.NDArray[Any]
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    attended: npt.NDArray[np.float32]
    spans: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    tails: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    words: npt.NDArray[np.uint32]
    scale: Any
    softcap: Any
    window: int
    sinks: npt.NDArray[np.float32]


class Tile(NamedTuple):
    """``num_queries`` queries from ``first_query`` of one sequence and one head of keys.

    Columns are read for all of them at once from ``origin``, a multiple of the lanes, to ``stop``:
    the contiguous columns that any of them sees, windows aside; in AMX tiles all that any of them
    sees.
    """

    first_row: int
    first_query: int
    num_queries: int
    num_groups: int
    kv_head: int
    first_key: int
    origin: int
    stop: int


class Query(NamedTuple):
    """One head of one row, and its ``place`` in the tile."""

    place: int
    row: int
    head: int


@inlined
def _lists_at(address: int) -> Any:
    """Spans, rows and tails, whose addresses and lengths are six int64 at ``address``."""
    listed = integers_at(address, 1, 6)[0]
    spans, rows = integers_at(listed[0], listed[1], 3), integers_at(listed[2], listed[3], 3)
    return spans, rows, integers_at(listed[4], 1, listed[5])[0]


def calls_of(
    queries_of: Any, stored_of: Any, num_queries: int = QUERIES_PER_TILE, numbers_per_item: int = 1
) -> Any:
    """A function for compiled code that builds the :class:`Call` from an entry point's arguments,
    see :func:`~hdserve.engine.kernels.attention.attend`.

    Args:
        queries_of, stored_of: give the matrices at an address: queries, and keys or values.
        num_queries: whose scores are kept.
        numbers_per_item: how many numbers of a query are viewed as one.
    """

    @inlined
    def call_at(places: Any, num_heads: int, scores: Any, terms: Any) -> Call:
        stored_at, listed_at, queries_at, attended_at = places
        scores_at, scores_size = scores
        scale, softcap, window, sinks_at = terms
        stored = integers_at(stored_at, 1, 6)[0]
        num_kv_heads, num_kv_rows, key_size, value_size = stored[2], stored[3], stored[4], stored[5]
        spans, rows, tails = _lists_at(listed_at)
        num_rows = rows.shape[0]
        return Call(
            queries_of(queries_at, num_rows, num_heads, key_size // numbers_per_item),
            stored_of(stored[0], num_kv_heads, num_kv_rows, key_size),
            stored_of(stored[1], num_kv_heads, num_kv_rows, value_size),
            float_matrices_at(attended_at, num_rows, num_heads, value_size),
            spans,
            rows,
            tails,
            floats_at(scores_at, num_queries, scores_size),
            words_at(scores_at, num_queries, scores_size),
            np.float32(scale),
            np.float32(softcap),
            window,
            floats_at(sinks_at, min(sinks_at, 1), num_heads),
        )

    return call_at


@inlined
def query_at(tile: Tile, place: int) -> Query:
    """The query at a place of a tile."""
    number = tile.first_query + place
    head = tile.kv_head * tile.num_groups + number % tile.num_groups
    return Query(place, tile.first_row + number // tile.num_groups, head)


@inlined
def query_from(index: int, given: tuple[Tile, int]) -> Query:
    """The query ``index`` places after the given one, or the tile's last one."""
    tile, place = given
    return query_at(tile, min(place + index, tile.num_queries - 1))


@inlined
def kv_row_of(call: Call, tile: Tile, row: int, position: int) -> int:
    """Where the key of ``position`` is as ``row`` sees it; beyond the row's last one, that one."""
    prefix, first_tail, visible = call.rows[row, 0], call.rows[row, 1], call.rows[row, 2]
    column: int = min(position, visible - 1)
    if column >= prefix:
        column = call.tails[first_tail + column - prefix]
    return tile.first_key + column
