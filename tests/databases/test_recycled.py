"""What the model thought likely: the newest row of every context, within a bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases.compiled import jit
from hdserve.databases.ngram import HASH_SEED, Tokens, extend_hash, most_frequent
from hdserve.databases.recycled import NUM_TOP, SHARE_UNITS, RecycledDatabase, write_top

ROWS = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 500), min_size=1, max_size=NUM_TOP)),
    max_size=60,
)


@jit
def write(rows, size, context, tokens, shares, stamp):  # type: ignore[no-untyped-def]
    value = HASH_SEED
    for token in context:
        value = extend_hash(value, np.int64(token))
    write_top(rows, size, value, tokens, shares, stamp)


def put(database: RecycledDatabase, context: list[int], top: list[tuple[int, float]]) -> None:
    tokens, shares = np.zeros(NUM_TOP, np.int32), np.zeros(NUM_TOP, np.float32)
    for index, (token, share) in enumerate(top):
        tokens[index], shares[index] = token, share
    newest_first: Tokens = np.array(context[::-1], np.int32)
    table = database.table
    while table.is_reserve_low(1):
        table.reserve_more()
    write(table.rows, table.size, newest_first, tokens, shares, table.stamp)
    table.advance_stamp()


def held(database: RecycledDatabase, context: list[int]) -> list[tuple[int, int]]:
    return most_frequent(database.table.rows, database.table.size, context, NUM_TOP)


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_the_newest_row_of_a_context_counts(written: list[tuple[int, list[int]]]) -> None:
    """Compared with a dictionary: rows are replaced, never added up."""
    database = RecycledDatabase(1 << 20)
    reference: dict[int, list[int]] = {}
    for context, tokens in written:
        distinct = list(dict.fromkeys(tokens))
        put(database, [context, 1], [(token, 0.5**n) for n, token in enumerate(distinct, 1)])
        reference[context] = distinct
    for context, tokens in reference.items():
        assert [token for token, _ in held(database, [context, 1])] == tokens
        counts = [count for _, count in held(database, [context, 1])]
        assert counts == [int(0.5**n * SHARE_UNITS) for n in range(1, len(tokens) + 1)]


def test_shares_too_small_to_keep_are_left_out() -> None:
    database = RecycledDatabase(1 << 20)
    put(database, [5], [(1, 0.9), (2, 1e-6)])
    assert [token for token, _ in held(database, [5])] == [1]


def test_memory_is_bounded_and_the_newest_contexts_stay() -> None:
    max_bytes = 1 << 16
    database = RecycledDatabase(max_bytes)
    for context in range(20000):
        put(database, [context], [(context % 500, 1.0)])
    assert database.num_bytes <= max_bytes
    newest = [context for context in range(19900, 20000) if held(database, [context])]
    oldest = [context for context in range(0, 10000) if held(database, [context])]
    assert len(newest) > 90
    assert not oldest


def test_rows_are_reserved_little_by_little() -> None:
    """All that is reserved may be resident, and there may be thousands of namespaces."""
    database = RecycledDatabase(1 << 20)
    assert database.table.rows.nbytes <= 1 << 14
    rows = database.table.rows
    for context in range(200):
        put(database, [context], [(context, 1.0)])
    assert database.table.rows is not rows
    assert database.table.rows.nbytes <= 1 << 18
    assert sum(bool(held(database, [context])) for context in range(200)) > 190
