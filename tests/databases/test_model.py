"""The model database: bounded, isolated by namespace, and complete where it has room."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.core import SamplingParams, Sequence, SpeculationParams
from hdserve.databases.model import MAX_COUNTED_TOKENS, MAX_PUT_OFF_TOKENS, ModelDatabase
from hdserve.databases.namespace_tables import NamespaceTables
from hdserve.databases.ngram import START, grow, most_frequent, put
from tests.compiled import called


def _next(database: ModelDatabase, namespace: str, context: list[int]) -> list[int]:
    partition = database.partition(namespace)
    if partition is None:
        return []
    found = most_frequent(partition.table.rows, partition.table.size, context, 13)
    return [token for token, _ in found]


def _sequence(prompt: list[int], output: list[int], **speculation: object) -> Sequence:
    seq = Sequence("r", list(prompt), SamplingParams(), SpeculationParams(**speculation))  # type: ignore[arg-type]
    seq.token_ids += output
    return seq


def test_empty_database_costs_nothing() -> None:
    database = ModelDatabase()
    assert (database.num_bytes, database.num_tokens, database.num_entries) == (0, 0, 0)
    assert database.partition("default") is None


@pytest.mark.parametrize("num_tokens", [1, 8, 40, 150])
def test_all_that_small_namespaces_take_is_counted(num_tokens: int) -> None:
    """With what is reserved, and the objects: there may be tens of thousands of namespaces."""
    database = ModelDatabase()
    texts = [list(range(num_tokens)), list(range(num_tokens // 2, num_tokens))]
    namespaces = [str(number) for number in range(300)]
    database.insert("first", texts[0])
    tracemalloc.start()
    num_counted = database.num_bytes
    for namespace in namespaces:
        for text in texts:
            database.insert(namespace, text)
        database.recycling(namespace, num_tokens)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes * 0.8 < database.num_bytes - num_counted
    assert num_bytes * 1.2 > database.num_bytes - num_counted


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, list])
def test_insert_and_apply_take_lists_and_arrays(dtype: type) -> None:
    database = ModelDatabase()
    text = [1, 2, 3, 1, 2, 3]
    given_text = text if dtype is list else np.array(text, dtype)
    database.insert("a", given_text)
    database.apply("a", [given_text, given_text])
    assert (database.num_tokens, database.num_entries) == (18, 3)
    assert _next(database, "a", [1, 2]) == [3]
    assert database.num_bytes > 0


@pytest.mark.parametrize("wrong", [-1, -5, 1 << 20, 1 << 40, -(1 << 40)])
def test_a_text_ends_before_what_is_no_token(wrong: int) -> None:
    database = ModelDatabase()
    database.insert("a", [1, 2, 3, wrong, 4, 5])
    assert database.num_tokens == 3
    assert _next(database, "a", [1, 2]) == [3]


@pytest.mark.parametrize("num_tokens", [500, 4000, 2**14])
def test_first_text_of_a_namespace_is_kept(num_tokens: int) -> None:
    """However long it is: the table grows while it comes."""
    database = ModelDatabase()
    text = np.random.default_rng(0).integers(0, 30_000, num_tokens).tolist()
    database.insert("a", text)
    asked = range(2, num_tokens, max(1, num_tokens // 500))
    found = sum(text[end] in _next(database, "a", text[end - 2 : end]) for end in asked)
    assert found > 0.9 * len(asked)


def test_impossible_ids_end_a_text() -> None:
    """A delta of a broken replica cannot bring ids into the table that no token has."""
    database = ModelDatabase()
    database.insert("a", np.array([1, 2, 2**31, 4], np.uint32))
    database.insert("a", [5, -7, 6])
    database.insert("a", [])
    assert database.num_tokens == 3
    assert _next(database, "a", []) == [5, 2, 1]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 99), max_size=30)), max_size=20
    )
)
def test_namespaces_are_isolated(texts: list[tuple[str, list[int]]]) -> None:
    """What a namespace drafts from equals what it would hold alone."""
    shared = ModelDatabase()
    alone = {namespace: ModelDatabase() for namespace in "abc"}
    for namespace, text in texts:
        shared.insert(namespace, text)
        alone[namespace].insert(namespace, text)
    for namespace, database in alone.items():
        mine, other = shared.partition(namespace), database.partition(namespace)
        if other is None:
            assert mine is None
            continue
        assert mine is not None
        assert np.array_equal(mine.table.size, other.table.size)
        in_use = mine.table.num_buckets * 8
        assert np.array_equal(mine.table.rows[:in_use], other.table.rows[:in_use])
        assert np.array_equal(mine.log[: mine.log_end], other.log[: other.log_end])


def test_memory_is_bounded_and_recent_text_stays() -> None:
    """Ten times more text than fits: the bound holds and the last texts are there."""
    max_bytes = 1 << 20
    database = ModelDatabase(max_bytes)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 30_000, 200).tolist() for _ in range(400)]
    for text in texts:
        database.insert("a", text)
    assert database.num_bytes <= max_bytes
    held = sum(
        _next(database, "a", texts[-1][at : at + 2])[:1] == [texts[-1][at + 2]] for at in range(150)
    )
    assert held > 120
    partition = database.partition("a")
    assert partition is not None
    assert partition.texts_since(0)[-1] == texts[-1]


def test_frequent_text_survives_a_flood() -> None:
    database = ModelDatabase(1 << 19)
    rng = np.random.default_rng(0)
    for _ in range(300):
        database.insert("a", [11, 12, 13, 14, *rng.integers(100, 30_000, 100).tolist()])
    assert _next(database, "a", [11, 12])[:1] == [13]


def _feed(database: ModelDatabase, namespace: str, num_texts: int, seed: int = 0) -> list[int]:
    """Insert random texts; returns the last."""
    rng = np.random.default_rng(seed)
    text: list[int] = []
    for _ in range(num_texts):
        text = rng.integers(0, 5000, 200).tolist()
        database.insert(namespace, text)
    return text


def _share_known(database: ModelDatabase, namespace: str, text: list[int]) -> float:
    """Of the tokens of a text, the share that is drafted first after the two before."""
    places = range(len(text) - 2)
    known = (_next(database, namespace, text[at : at + 2])[:1] == [text[at + 2]] for at in places)
    return sum(known) / len(places)


def test_a_busy_namespace_takes_nothing_from_quiet_ones() -> None:
    """It gives way itself, and keeps what it said last."""
    database = ModelDatabase(4 << 20)
    quiet = [f"quiet {number}" for number in range(5)]
    texts = {name: _feed(database, name, 1, seed) for seed, name in enumerate(quiet)}
    before = [_share_known(database, name, text) for name, text in texts.items()]
    last = _feed(database, "busy", 300, 9)
    assert database.namespaces == (*quiet, "busy")
    assert [_share_known(database, name, text) for name, text in texts.items()] == before
    assert min(before) > 0.5
    assert _share_known(database, "busy", last) > 0.5
    assert database.num_dropped == 0
    assert database.num_bytes <= 4 << 20


def test_busy_namespaces_share_the_room() -> None:
    """However the first one filled it; texts read back from the logs are whole."""
    database = ModelDatabase(4 << 20)
    _feed(database, "first", 300, 1)
    for seed in range(300):
        texts = {name: _feed(database, name, 1, seed) for name in ("second", "third")}
    sizes = []
    for name in ("first", "second", "third"):
        partition = database.partition(name)
        assert partition is not None
        sizes.append(partition.num_bytes)
        assert all(len(text) == 200 for text in partition.texts_since(0)[1:])
    assert min(sizes) > max(sizes) / 2
    assert sum(sizes) == database.num_text_bytes <= 4 << 20
    assert all(_share_known(database, name, text) > 0.5 for name, text in texts.items())
    assert database.num_dropped == 0
    assert database.num_given_up > 0


def test_a_namespace_grows_again_when_there_is_room() -> None:
    database = ModelDatabase(2 << 20)
    for seed in range(200):
        for name in ("a", "b"):
            _feed(database, name, 1, seed)
    partition = database.partition("a")
    assert partition is not None
    before = partition.num_bytes
    database.clear("b")
    text = _feed(database, "a", 200)
    assert partition.num_bytes > before * 1.5
    assert partition.texts_since(0)[-1] == text
    assert database.num_bytes <= 2 << 20


def test_a_limit_holds_whatever_the_log_was_when_it_was_set() -> None:
    """The table leaves it the room that it may still take."""
    tables = NamespaceTables(1 << 20)
    tables.limit(1 << 19)
    rng = np.random.default_rng(0)
    for _ in range(100):
        text = rng.integers(0, 30_000, 200)
        tables.insert(np.array([START, *text], np.int32))
        assert tables.num_bytes <= 1 << 19
    assert tables.num_bytes > 1 << 18


def test_namespaces_are_dropped_when_there_are_too_many() -> None:
    """Those that were not used for longest, and it is counted."""
    database = ModelDatabase(1 << 19)
    for number in range(200):
        database.insert(str(number), [1, 2, 3])
    left = len(database.namespaces)
    assert database.namespaces == tuple(str(number) for number in range(200 - left, 200))
    assert left > 20
    assert database.num_dropped == 200 - left
    assert database.num_bytes <= 1 << 19
    database.clear()
    assert database.num_bytes == 0


def test_a_busy_namespace_takes_no_recycled_contexts_from_quiet_ones() -> None:
    database = ModelDatabase(4 << 20)
    rng = np.random.default_rng(0)
    for name in ("quiet", *["busy"] * 400):
        table = database.recycling(name, 40).table
        for context in rng.integers(0, 1 << 62, 40):
            called(put)(table.rows, table.size, np.uint64(context), 1, table.stamp, 0)
            called(grow)(table.rows, table.size, 0)
    assert database.recycled("quiet") is not None
    assert database.recycling("busy", 0).num_bytes > 1 << 17
    assert database.num_recycled_bytes <= (4 << 20) / 16


def test_clear_forgets() -> None:
    database = ModelDatabase()
    database.insert("a", [1, 2, 3])
    database.insert("b", [1, 2, 3])
    database.clear("a")
    assert database.namespaces == ("b",)
    database.clear()
    assert database.num_tokens == 0


def test_record_takes_outputs_once_and_only_shared_ones() -> None:
    database = ModelDatabase()
    seq = _sequence([7, 8, 9], [1, 2, 3])
    database.record(seq)
    database.record(seq)
    database.record(_sequence([7], [4, 5, 6], is_output_shared=False))
    assert (database.num_tokens, database.num_entries) == (3, 1)
    assert _next(database, "default", [7, 8]) == []


def test_what_ended_is_put_off_until_somebody_reads() -> None:
    database, at_once = ModelDatabase(1 << 20), ModelDatabase(1 << 20)
    outputs = [[number, 5, 6, number] for number in range(3)]
    for output in outputs:
        database.record(_sequence([7], output))
        at_once.insert("default", output)
    assert not [*database._texts]
    database.catch_up()
    version = database.version
    found, wanted = database.partition("default"), at_once.partition("default")
    assert found is not None
    assert wanted is not None
    assert np.array_equal(found.table.rows, wanted.table.rows)
    assert np.array_equal(found.log, wanted.log)
    assert database.version == version, "nothing is left to insert"


def test_no_more_is_put_off_than_pays() -> None:
    database = ModelDatabase()
    num_tokens = MAX_PUT_OFF_TOKENS // 4
    for number in range(6):
        database.record(_sequence([7], [number] * num_tokens))
    assert sum(partition.num_tokens for partition in database._texts) == 4 * num_tokens
    assert database.num_tokens == 6 * num_tokens


def test_what_was_put_off_comes_in_the_order_in_which_it_ended() -> None:
    """However many short outputs there are."""
    database = ModelDatabase()
    texts = [[number] for number in range(MAX_PUT_OFF_TOKENS - 2)]
    for output in texts:
        database.record(_sequence([7], output))
    partition = database.partition("default")
    assert partition is not None
    assert partition.texts_since(0)[1:] == texts


def test_a_long_output_is_inserted_in_parts() -> None:
    """Whoever reads waits for one only, and what ended later comes later; it is as if it had come
    at once in the end."""
    database, at_once = ModelDatabase(8 << 20), ModelDatabase(8 << 20)
    output = [token * 7919 % 50_021 for token in range(5 * MAX_COUNTED_TOKENS + 10)]
    for text in (output, [3, 4]):
        database.record(_sequence([7], text))
        at_once.insert("default", text)
    counted = [sum(partition.num_tokens for partition in database._texts)]
    assert counted[0] <= 2 * MAX_COUNTED_TOKENS
    while counted[-1] < len(output) + 2:
        database.catch_up()
        counted.append(sum(partition.num_tokens for partition in database._texts))
        assert 0 < counted[-1] - counted[-2] <= MAX_COUNTED_TOKENS + 12
    found, wanted = database.partition("default"), at_once.partition("default")
    assert found is not None
    assert wanted is not None
    assert np.array_equal(found.log, wanted.log)
    assert found.num_texts == 2
    assert found.num_tokens == wanted.num_tokens
    assert _next(database, "default", output[20_000:20_002]) == [output[20_002]]


def test_a_long_output_that_runs_is_counted_in_parts() -> None:
    """That of a sequence that was alone until now."""
    database = ModelDatabase(8 << 20)
    seq = _sequence([7], [token * 7919 % 50_021 for token in range(2 * MAX_COUNTED_TOKENS + 10)])
    for num_counted in (1, 2):
        database.record_running([seq])
        assert database.num_tokens == num_counted * MAX_COUNTED_TOKENS
    database.record_running([seq])
    assert database.num_tokens == seq.num_output_tokens
    database.record(seq)
    assert (database.num_tokens, database.num_entries) == (seq.num_output_tokens, 1)


def test_a_long_output_is_not_counted_after_what_is_no_token() -> None:
    database = ModelDatabase(8 << 20)
    output = [5] * (3 * MAX_COUNTED_TOKENS)
    output[MAX_COUNTED_TOKENS + 7] = -1
    database.record(_sequence([7], output))
    for _ in range(4):
        database.catch_up()
    assert database.num_tokens == MAX_COUNTED_TOKENS + 7


def test_what_was_put_off_is_forgotten_with_the_rest() -> None:
    database = ModelDatabase()
    for namespace in ("a", "b"):
        seq = _sequence([7], [1, 2, 3])
        seq.namespace = namespace
        database.record(seq)
    database.clear("a")
    assert database.namespaces == ("b",)
    database.record(_sequence([7], [1, 2, 3]))
    database.clear()
    assert database.num_entries == 0


@given(
    output=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    steps=st.lists(st.integers(1, 9), max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_running_output_counts_as_if_it_had_come_at_once(
    output: list[int], steps: list[int]
) -> None:
    whole, parts = ModelDatabase(1 << 20), ModelDatabase(1 << 20)
    whole.record(_sequence([7, 8, 9], output))
    seq = _sequence([7, 8, 9], [])
    done = 0
    for step in steps:
        seq.token_ids += output[done : done + step]
        done += step
        parts.record_running([seq])
        parts.record_running([seq])
    seq.token_ids += output[done:]
    parts.record(seq)
    parts.record_running([seq])
    first, second = whole.partition("default"), parts.partition("default")
    assert first is not None
    assert second is not None
    assert (first.num_tokens, first.num_texts) == (second.num_tokens, second.num_texts)
    assert np.array_equal(first.table.rows, second.table.rows)
    assert np.array_equal(first.log, second.log)


def test_running_output_is_there_for_others_at_once() -> None:
    """Answers to one question run side by side: what one says, the next one says a step later."""
    database = ModelDatabase()
    seq = _sequence([7, 8, 9], [])
    for number, token in enumerate((4, 5, 6), start=1):
        seq.token_ids.append(token)
        database.record_running([seq])
        assert database.num_tokens == number
    assert _next(database, "default", [4, 5]) == [6]


def test_an_answer_that_goes_on_after_a_flush_is_counted_whole() -> None:
    """As its text is in the log whole, too."""
    database, whole = ModelDatabase(1 << 20), ModelDatabase(1 << 20)
    database.insert("default", [8, 9])
    seq = _sequence([7], [1, 2, 3, 4])
    database.record_running([seq])
    database.clear("default")
    database.insert("default", [8, 9])
    seq.token_ids += [5, 6]
    database.record(seq)
    whole.insert("default", [8, 9])
    whole.insert("default", seq.output_token_ids)
    found, wanted = database.partition("default"), whole.partition("default")
    assert found is not None
    assert wanted is not None
    assert found.num_tokens == wanted.num_tokens == 8
    assert _next(database, "default", [1, 2]) == [3]
    assert np.array_equal(found.log, wanted.log)


def test_running_output_counts_whole_where_its_namespace_was_dropped() -> None:
    """What another namespace displaced in the same call is none of what was counted."""
    database = ModelDatabase(1 << 15)
    seq = _sequence([7], list(range(100, 120)))
    seq.namespace = "dropped"
    database.record_running([seq])
    others = [_sequence([7], list(range(200, 300))) for _ in range(12)]
    for number, other in enumerate(others):
        other.namespace = f"other {number}"
    seq.token_ids += range(120, 124)
    database.record_running([*others, seq])
    partition = database.partition("dropped")
    assert partition is not None
    assert partition.num_tokens == 24


def test_running_output_that_is_not_shared_stays_out() -> None:
    database = ModelDatabase()
    database.record_running([_sequence([1], [2, 3], is_output_shared=False)])
    assert database.num_tokens == 0


def test_log_survives_growth_and_wrapping() -> None:
    """Texts read back from the log are what was inserted, oldest forgotten first."""
    database = ModelDatabase(1 << 18)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 500, int(rng.integers(1, 90))).tolist() for _ in range(300)]
    partition = None
    for text in texts:
        database.insert("a", text)
    partition = database.partition("a")
    assert partition is not None
    kept = partition.texts_since(0)
    assert 1 < len(kept) < len(texts)
    assert kept[1:] == texts[-len(kept) + 1 :]


def test_the_log_of_a_full_namespace_is_kept_until_others_need_much() -> None:
    """Its bound changes with every text of theirs, and its size is a power of two."""
    database = ModelDatabase(4 << 20)
    _feed(database, "first", 400, 1)
    partition = database.partition("first")
    assert partition is not None
    log = partition.log
    texts = partition.texts_since(0)
    _feed(database, "second", 1, 2)
    assert partition.max_bytes < database.max_bytes * 15 // 16
    assert partition.log is log
    assert partition.texts_since(0) == texts
    _feed(database, "second", 400, 3)
    assert len(partition.log) == len(log) // 2
    assert database.num_bytes <= 4 << 20
