"""The compiled n-gram table equals its model in plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import ngram
from hdserve.databases.ngram import NgramTable
from tests.databases.reference import ReferenceTable, read_table

ORDERS = [0, 1, 2, 4]
TEXTS = st.lists(
    st.lists(st.integers(0, 9) | st.integers(0, ngram.MAX_TOKEN_ID), max_size=60), max_size=8
)


def _insert(table: NgramTable, text: list[int], stamp: int, orders: list[int]) -> None:
    tokens = np.array([ngram.START, *text], np.int32)
    order_array = np.array([*orders, -1], np.int64)
    ngram.insert_tokens(table.rows, table.size, tokens, 1, len(tokens), order_array, stamp, 0)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, max_buckets=st.sampled_from([1, 3, 20, 64]))
def test_table_equals_the_reference(texts: list[list[int]], max_buckets: int) -> None:
    """Rows, slots, order, growth and forgetting are the same after any insertions."""
    table = NgramTable(max_buckets * ngram.BUCKET_BYTES)
    reference = ReferenceTable(table.num_buckets, max_buckets)
    for stamp, text in enumerate(texts, 1):
        _insert(table, text, stamp * 40, ORDERS)
        reference.insert([ngram.START, *text], 1, ORDERS, stamp * 40)
    assert read_table(table.rows, table.num_buckets) == reference.buckets
    assert table.num_buckets <= max_buckets


def test_counts_are_halved_before_they_overflow() -> None:
    """A context seen 100,000 times keeps sensible shares and the order of its tokens."""
    table = NgramTable(1 << 16)
    reference = ReferenceTable(table.num_buckets, table.max_buckets)
    text = [7, 7, 7, 8] * 25_000
    _insert(table, text, 1, [0])
    reference.insert([ngram.START, *text], 1, [0], 1)
    assert read_table(table.rows, table.num_buckets) == reference.buckets
    found = ngram.most_frequent(table.rows, table.size, [], 13)
    assert [token for token, _ in found] == [7, 8]
    assert 2.5 < found[0][1] / found[1][1] < 3.5


def test_memory_is_bounded_and_the_frequent_stays() -> None:
    """Random text far beyond the bound does not push out what keeps coming back."""
    table = NgramTable(64 * ngram.BUCKET_BYTES)
    rng = np.random.default_rng(0)
    phrase = [101, 102, 103, 104]
    for stamp in range(1, 200):
        _insert(table, phrase + rng.integers(1000, 900_000, 50).tolist(), stamp, [1, 2])
    assert table.num_bytes <= 64 * ngram.BUCKET_BYTES
    assert table.count_rows() <= 64 * ngram.BUCKET_ROWS
    assert ngram.most_frequent(table.rows, table.size, [101, 102], 1)[0][0] == 103


def test_what_is_not_used_for_long_is_forgotten_first() -> None:
    """A context that was frequent long ago gives way to newer ones."""
    table = NgramTable(ngram.BUCKET_BYTES)
    _insert(table, [1, 2] * 50, 1, [1])
    for stamp in range(2000, 2100):
        _insert(table, [stamp, stamp + 1], stamp, [1])
    assert ngram.most_frequent(table.rows, table.size, [1], 1) == []


def test_reserve_more_keeps_everything() -> None:
    """Moving to a larger reserve changes no row."""
    table = NgramTable(1 << 20, reserve_bytes=1 << 14)
    rng = np.random.default_rng(1)
    while not table.is_reserve_low:
        _insert(table, rng.integers(0, 500, 20).tolist(), 1, [1, 2])
    before = read_table(table.rows, table.num_buckets)
    table.reserve_more()
    assert read_table(table.rows, table.num_buckets) == before
    assert not table.is_reserve_low


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
def test_merged_tables_hold_the_sum(texts: list[list[int]]) -> None:
    """With room enough, merging equals inserting everything, up to the order of equals."""
    half = len(texts) // 2
    parts = [NgramTable(1 << 20), NgramTable(1 << 20)]
    for part, some in zip(parts, (texts[:half], texts[half:]), strict=True):
        for text in some:
            _insert(part, text, 1, [1])
    first, second = parts
    ngram.merge_tables(second.rows, second.num_buckets, first.rows, first.size, 1)
    contexts: dict[int, dict[int, int]] = {}
    for text in texts:
        for before, token in zip([ngram.START, *text], text, strict=False):
            counts = contexts.setdefault(before, {})
            counts[token] = counts.get(token, 0) + 1
    for before, counts in contexts.items():
        if len(counts) <= ngram.NUM_SLOTS:
            found = ngram.most_frequent(first.rows, first.size, [before], ngram.NUM_SLOTS)
            assert dict(found) == counts


def test_old_stamps_are_rebased() -> None:
    """Age marks keep their differences when they are lowered, and stop at 0."""
    table = NgramTable(1 << 16)
    _insert(table, [1], 10, [0, 1])
    _insert(table, [2], 500, [1])
    ngram.rebase_stamps(table.rows, table.num_buckets, 100)
    stamps = {row.stamp for bucket in read_table(table.rows, table.num_buckets) for row in bucket}
    assert stamps == {0, 400}
