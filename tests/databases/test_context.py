"""The context database of one request and the pool its tables come from."""

from __future__ import annotations

import numpy as np
import pytest

from hdserve.databases import context, ngram
from hdserve.databases.context import ContextDatabase, ContextPool
from hdserve.databases.last_positions import distance_to
from tests.compiled import called
from tests.databases.reference import context_hash

ORDERS = np.array([0, 1, 2, 3, -1], np.int64)


def _row_tokens(database: ContextDatabase, tokens: list[int]) -> list[int]:
    """Tokens that followed a context, most frequent first."""
    stamp = database.table.stamp
    value = np.uint64(context_hash(tokens))
    row = called(ngram.find_row)(database.table.rows, int(database.size[0]), value, stamp)
    if row < 0:
        return []
    return [int(word) & ngram.MAX_TOKEN_ID for word in database.table.rows[row, 3:] if word]


def test_prompt_can_be_looked_up() -> None:
    database = ContextDatabase(ContextPool(), [1, 2, 3, 1, 2, 4, 1, 2, 4], ORDERS, 20)
    assert called(distance_to)(database.last_positions, 3, 9) == 7
    assert _row_tokens(database, [1, 2]) == [4, 3]
    assert _row_tokens(database, [3]) == [1]
    assert _row_tokens(database, [9]) == []


def test_returned_table_is_empty_for_the_next_request() -> None:
    """A table is used again without being cleared, and nothing of the last request is left."""
    pool = ContextPool()
    first = ContextDatabase(pool, [1, 2, 3] * 20, ORDERS, 100)
    rows = first.table.rows
    first.release()
    second = ContextDatabase(pool, [5, 6, 7] * 20, ORDERS, 100)
    assert second.table.rows is rows
    assert _row_tokens(second, [1, 2]) == []
    assert _row_tokens(second, [5, 6]) == [7]


def test_pool_keeps_no_more_than_its_bound() -> None:
    pool = ContextPool(max_bytes=1 << 19)
    databases = [ContextDatabase(pool, [1] * 50, ORDERS, 100) for _ in range(10)]
    for database in databases:
        database.release()
    assert 0 < pool.num_bytes <= 1 << 19


def test_stamps_start_anew_when_they_are_used_up() -> None:
    pool = ContextPool()
    table = pool.take(64)
    table.stamp = ngram.MAX_STAMP
    table.rows[:] = 1
    pool.give_back(table)
    again = pool.take(64)
    assert again is table
    assert again.stamp == 1
    assert not again.rows.any()


@pytest.mark.parametrize(("num_tokens", "mib"), [(3000, 3), (8192, 9), (40_000, 11), (131_072, 14)])
def test_long_prompt_is_bounded_and_complete_in_the_end(num_tokens: int, mib: int) -> None:
    """What is not inserted at once follows in pieces, before a short answer ends, and memory stays
    below the bound, where the rarest contexts make room."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, num_tokens).tolist()
    prompt[:12] = [2001, 2002, 2003] * 4
    database = ContextDatabase(ContextPool(), prompt, ORDERS, num_tokens + 100)
    is_eager = num_tokens <= context.EAGER_TOKENS
    assert _row_tokens(database, [2001, 2002]) == ([2003] if is_eager else [])
    num_pieces = 0
    while not database.is_complete:
        database.continue_prompt()
        num_pieces += 1
    assert num_pieces <= 12
    assert _row_tokens(database, [2001, 2002]) == [2003]
    assert database.num_bytes <= mib << 20
    assert database.num_entries <= len(database.table.rows)


def test_enlarging_keeps_tokens_and_contexts() -> None:
    database = ContextDatabase(ContextPool(), [1, 2, 3, 4] * 15, ORDERS, 60)
    assert not database.has_room(100)
    reserved = len(database.table.rows) // ngram.BUCKET_ROWS
    database.size[:] = reserved, 1 << 20
    assert database.is_table_full
    database.enlarge(100)
    assert database.has_room(100)
    assert len(database.table.rows) // ngram.BUCKET_ROWS >= 2 * reserved
    assert database.tokens[:4].tolist() == [1, 2, 3, 4]
    assert _row_tokens(database, [1, 2]) == [3]
    assert [called(distance_to)(database.last_positions, token, 60) for token in range(6)] == [
        *(0, 4, 3, 2, 1),
        0,
    ]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(context, "new_places"), (context, "new_last_positions"), (ContextPool, "take")],
)
def test_text_that_could_not_be_enlarged_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """Whatever memory is missing for, the next call finds that there is no room yet."""
    database = ContextDatabase(ContextPool(), [1, 2, 3, 4] * 15, ORDERS, 60)
    database.size[:] = len(database.table.rows) // ngram.BUCKET_ROWS, 1 << 20
    before = database.tokens, database.places, database.last_positions, database.table
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _without_memory)
        with pytest.raises(MemoryError):
            database.enlarge(100)
    after = database.tokens, database.places, database.last_positions, database.table
    assert all(new is old for new, old in zip(after, before, strict=True))
    assert not database.has_room(100)
    database.enlarge(100)
    assert database.has_room(100)


def _without_memory(*_: object) -> None:
    raise MemoryError


def test_enlarging_before_the_prompt_is_complete_notes_no_place_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "EAGER_TOKENS", 16)
    monkeypatch.setattr(context, "PIECE_TOKENS", 16)
    database = ContextDatabase(ContextPool(), list(range(64)), ORDERS, 64)
    database.continue_prompt()
    database.enlarge(10)
    while not database.is_complete:
        database.continue_prompt()
    positions = database.places[database.places > 0] & ((1 << 40) - 1)
    assert sorted(positions.tolist()) == list(range(5, 64))


@pytest.mark.parametrize(("num_expected", "capacity"), [(64, 64), (65, 128), (4096, 4096)])
def test_there_is_room_for_as_many_tokens_as_are_expected(num_expected: int, capacity: int) -> None:
    database = ContextDatabase(ContextPool(), [1, 2, 3], ORDERS, num_expected)
    assert len(database.tokens) == capacity
    assert database.has_room(num_expected - 3)
