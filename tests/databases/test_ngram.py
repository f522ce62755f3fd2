"""The compiled n-gram table equals its model in plain Python."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import ngram
from hdserve.databases.ngram_table import MAX_COPIED_BYTES, NgramTable
from hdserve.databases.table_merge import NO_COUNT_SHIFTS, merge_tables
from tests.compiled import called
from tests.databases.reference import ReferenceTable, Row, read_table

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


def test_a_small_table_that_gives_way_keeps_no_reserve() -> None:
    """Where the system has given all of it."""
    table = NgramTable(1 << 20, reserve_bytes=1 << 14)
    _insert(table, list(range(20)), 1, ORDERS)
    table.reserve_more(200)
    assert table.num_bytes == table.num_reserved * ngram.BUCKET_BYTES
    before = read_table(table.rows, table.num_buckets)
    assert len(before) < 20
    table.limit(20 * ngram.BUCKET_BYTES)
    assert table.num_bytes == 20 * ngram.BUCKET_BYTES
    assert read_table(table.rows, table.num_buckets) == before
    assert not table.is_reserve_low(1000)
    table.limit(1 << 20)
    assert table.is_reserve_low(1000)
    table.reserve_more(1000)
    assert not table.is_reserve_low(1000)


def test_reserve_more_keeps_everything() -> None:
    """Moving to a larger reserve changes no row."""
    table = NgramTable(1 << 20, reserve_bytes=1 << 14)
    rng = np.random.default_rng(1)
    while not table.is_reserve_low(0):
        _insert(table, rng.integers(0, 500, 20).tolist(), 1, [1, 2])
    before = read_table(table.rows, table.num_buckets)
    table.reserve_more()
    assert read_table(table.rows, table.num_buckets) == before
    assert not table.is_reserve_low(0)


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
def test_merged_tables_hold_the_sum(texts: list[list[int]]) -> None:
    """With room enough, merging equals inserting everything, up to the order of equals."""
    half = len(texts) // 2
    parts = [NgramTable(1 << 20), NgramTable(1 << 20)]
    for part in parts:
        part.size[ngram.NUM_BUCKETS] = part.num_reserved
    for part, some in zip(parts, (texts[:half], texts[half:]), strict=True):
        for text in some:
            _insert(part, text, 1, [1])
    first, second = parts
    merge_tables(second.rows, second.num_buckets, *NO_COUNT_SHIFTS, first.rows, first.size, 1)
    contexts: dict[int, dict[int, int]] = {}
    for text in texts:
        for before, token in zip([ngram.START, *text], text, strict=False):
            counts = contexts.setdefault(before, {})
            counts[token] = counts.get(token, 0) + 1
    for before, counts in contexts.items():
        if len(counts) <= ngram.NUM_SLOTS:
            found = ngram.most_frequent(first.rows, first.size, [before], ngram.NUM_SLOTS)
            assert dict(found) == counts


@pytest.mark.parametrize("num_texts", [1, 4, 10])
def test_merged_tables_keep_shares_and_ranks(num_texts: int) -> None:
    """Also of contexts that are counted more often than a row can hold."""
    rng = np.random.default_rng(num_texts)
    counted, merged = NgramTable(1 << 20), NgramTable(1 << 20)
    for _ in range(num_texts):
        text = np.full(12_000, 1)
        text[1::2] = rng.choice([2, 3, 4, 5], 6000, p=[0.6, 0.25, 0.1, 0.05])
        one = NgramTable(1 << 20)
        for table in (one, counted):
            _insert(table, text.tolist(), 1, [1])
        merge_tables(one.rows, one.num_buckets, *NO_COUNT_SHIFTS, merged.rows, merged.size, 1)
    shares = [_shares(table, [1]) for table in (merged, counted)]
    assert list(shares[0]) == list(shares[1]) == [2, 3, 4, 5]
    assert list(shares[0].values()) == pytest.approx(list(shares[1].values()), abs=0.01)
    assert num_texts > 1 or read_table(merged.rows, 16) == read_table(counted.rows, 16)


def _shares(table: NgramTable, context: list[int]) -> dict[int, float]:
    row = np.zeros((1, ngram.ROW_WORDS), np.uint32)
    assert ngram.copy_row(table.rows, table.size, np.array(context[::-1], np.int32), row)
    found = ngram.most_frequent(table.rows, table.size, context, ngram.NUM_SLOTS)
    return {token: count / int(row[0, 2] & 0xFFFF) for token, count in found}


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, num_buckets=st.integers(1, 70), num_more=st.integers(0, 70))
def test_a_limited_table_loses_only_what_has_no_room(
    texts: list[list[int]], num_buckets: int, num_more: int
) -> None:
    """Every context that is left is found where it belongs; the others are counted as given up,
    and are worth no more than any that is left in their bucket."""
    table = NgramTable(256 * ngram.BUCKET_BYTES, reserve_bytes=1 << 16)
    for stamp, text in enumerate(texts, 1):
        _insert(table, text, stamp * 40, ORDERS)
    before = {(row.low, row.high): row for row in _rows(table)}
    newest = len(texts) * 40
    table.stamp = newest
    num_given_up = table.limit(num_buckets * ngram.BUCKET_BYTES)
    assert table.num_buckets <= num_buckets
    kept = {(row.low, row.high): row for row in _rows(table)}
    assert all(before[key] == row for key, row in kept.items())
    assert len(before) == len(kept) + num_given_up
    reference = ReferenceTable(table.num_buckets, table.num_buckets)
    least: dict[int, int] = {}
    for (_, high), row in kept.items():
        value = reference._value(row, newest)
        bucket = reference.bucket_of(high)
        least[bucket] = min(value, least.get(bucket, value))
    for key in before.keys() - kept.keys():
        assert reference._value(before[key], newest) <= least[reference.bucket_of(key[1])]
    for (low, high), row in kept.items():
        index = called(ngram.find_row)(
            table.rows, table.num_buckets, np.uint64(low | high << 32), 0
        )
        assert int(table.rows[index, 2]) == row.total | row.stamp << 16
    table.limit((num_buckets + num_more) * ngram.BUCKET_BYTES)
    for text in texts:
        _insert(table, text, newest + 1, ORDERS)
    assert table.num_buckets <= num_buckets + num_more


def _rows(table: NgramTable) -> list[Row]:
    return [row for bucket in read_table(table.rows, table.num_buckets) for row in bucket]


def test_a_limited_table_gives_its_memory_back() -> None:
    """And reads what comes later as if it had always been that small."""
    table = NgramTable(64 << 20, reserve_bytes=64 << 20)
    rng = np.random.default_rng(0)
    _insert(table, rng.integers(0, 1 << 20, 100_000).tolist(), 1, [1, 2, 3])
    before = _resident_bytes()
    num_freed = table.num_bytes - (1 << 20)
    assert num_freed > 20 << 20
    table.limit(1 << 20)
    assert before - _resident_bytes() > num_freed * 0.9
    table.limit(64 << 20)
    text = rng.integers(0, 1 << 20, 100_000).tolist()
    _insert(table, text, 1, [1, 2])
    assert table.num_bytes > 10 << 20
    assert ngram.most_frequent(table.rows, table.size, text[-3:-1], 1)[0][0] == text[-1]


def _resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * mmap.PAGESIZE


def test_old_stamps_are_rebased() -> None:
    """Age marks keep their differences when they are lowered, and stop at 0."""
    table = NgramTable(1 << 16)
    _insert(table, [1], 10, [0, 1])
    _insert(table, [2], 500, [1])
    ngram.rebase_stamps(table.rows, table.num_buckets, 100)
    stamps = {row.stamp for bucket in read_table(table.rows, table.num_buckets) for row in bucket}
    assert stamps == {0, 400}


def test_a_large_table_is_copied_only_while_it_is_small() -> None:
    table = NgramTable(64 << 20, 1 << 15)
    num_copied = []
    while table.num_reserved < table.max_buckets:
        num_copied.append(table.num_reserved * ngram.BUCKET_BYTES)
        table.reserve_more()
    assert len(num_copied) > 2
    assert max(num_copied) <= MAX_COPIED_BYTES
