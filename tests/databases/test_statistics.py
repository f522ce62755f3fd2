"""The statistics database: what was counted is found, and what is broken is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hdserve.databases import statistics_builder
from hdserve.databases.ngram import MAX_TOKEN_ID, NUM_ADDED, most_frequent
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import FORMAT_VERSION, INFO_NAME, TABLE_NAME
from hdserve.errors import DatabaseError, SnapshotError
from tests.interruption import interrupted_at

TEXT = [5, 6, 7, 5, 6, 8, 5, 6, 7]


def _build(
    directory: Path, *texts: list[int], tokenizer: str = "t", vocab_size: int = 100
) -> StatisticsDatabase:
    builder = StatisticsBuilder(tokenizer, vocab_size, max_bytes=1 << 20)
    for text in texts:
        builder.add("corpus", text)
    builder.write(directory)
    return StatisticsDatabase.open(directory)


def _next(database: StatisticsDatabase, context: list[int]) -> list[tuple[int, int]]:
    return most_frequent(database.rows, database.size, context, 5)


def test_written_database_is_found_again(tmp_path: Path) -> None:
    database = _build(tmp_path / "s", TEXT, [1, 2])
    assert _next(database, [5, 6]) == [(7, 2), (8, 1)]
    assert _next(database, [9]) == []
    info = database.info
    assert (info.num_tokens, info.vocab_size, info.tokenizer) == (11, 100, "t")
    assert info.corpora[0].num_texts == 2
    database.verify()


def test_mapping_is_private(tmp_path: Path) -> None:
    """A process that wrote into its view would not reach the file."""
    database = _build(tmp_path / "s", TEXT)
    before = (tmp_path / "s" / TABLE_NAME).read_bytes()
    database.rows[:] = 0
    assert (tmp_path / "s" / TABLE_NAME).read_bytes() == before


def test_finished_in_memory_equals_written(tmp_path: Path) -> None:
    builder = StatisticsBuilder("t", 100, max_bytes=1 << 20)
    builder.add("corpus", TEXT)
    memory = builder.finish()
    builder.write(tmp_path / "s")
    disk = StatisticsDatabase.open(tmp_path / "s")
    in_use = disk.info.num_buckets * 8
    assert np.array_equal(memory.rows[:in_use], disk.rows)


@pytest.mark.parametrize("vocab_size", [70_000, MAX_TOKEN_ID + 1])
def test_large_vocabularies(tmp_path: Path, vocab_size: int) -> None:
    """Ids beyond 65,535 are kept whole."""
    last = vocab_size - 1
    database = _build(tmp_path / "s", [last, last - 1, last], vocab_size=vocab_size)
    assert _next(database, [last]) == [(last - 1, 1)]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    builder = StatisticsBuilder("t", 10)
    for wrong in ([1, 10], [-1]):
        with pytest.raises(DatabaseError, match="outside the vocabulary"):
            builder.add("corpus", wrong)
    with pytest.raises(DatabaseError, match="not supported"):
        StatisticsBuilder("t", MAX_TOKEN_ID + 2)


def test_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    _build(tmp_path / "s", TEXT, tokenizer="one")
    StatisticsDatabase.open(tmp_path / "s", tokenizer="one")
    with pytest.raises(SnapshotError, match="made for the tokenizer one, not for two"):
        StatisticsDatabase.open(tmp_path / "s", tokenizer="two")


def _damage_table(directory: Path, change: bytes | None, at: int) -> None:
    path = directory / TABLE_NAME
    data = bytearray(path.read_bytes())
    if change is None:
        del data[at:]
    else:
        data[at : at + len(change)] = change
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        (None, -100, "were written"),
        (None, 0, "were written"),
        (b"xxxx", 0, "checksum"),
        (b"xxxx", 700, "checksum"),
    ],
)
def test_damaged_table_is_refused(
    tmp_path: Path, change: bytes | None, at: int, message: str
) -> None:
    _build(tmp_path / "s", TEXT)
    _damage_table(tmp_path / "s", change, at)
    with pytest.raises(SnapshotError, match=message):
        StatisticsDatabase.open(tmp_path / "s")


def test_verify_finds_damage_in_the_middle(tmp_path: Path) -> None:
    """Opening samples the ends of a large file; ``verify`` reads all of it."""
    rng = np.random.default_rng(0)
    builder = StatisticsBuilder("t", 1 << 20, max_bytes=8 << 20)
    builder.add("corpus", rng.integers(0, 1 << 20, 40_000).tolist())
    builder.write(tmp_path / "s")
    _damage_table(tmp_path / "s", b"\1\2\3", 2 << 20)
    database = StatisticsDatabase.open(tmp_path / "s")
    with pytest.raises(SnapshotError, match="checksum"):
        database.verify()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("{", "corrupt"),
        ("[]", "corrupt"),
        ("{}", "corrupt"),
        ("[" * 100_000, "corrupt"),
        (json.dumps({"format_version": FORMAT_VERSION + 1}), "newer than"),
    ],
)
def test_damaged_info_is_refused(tmp_path: Path, info: str, message: str) -> None:
    _build(tmp_path / "s", TEXT)
    (tmp_path / "s" / INFO_NAME).write_text(info)
    with pytest.raises(SnapshotError, match=message):
        StatisticsDatabase.open(tmp_path / "s")


def test_contexts_of_other_lengths_are_refused(tmp_path: Path) -> None:
    """Nothing would be found in them."""
    _build(tmp_path / "s", TEXT)
    path = tmp_path / "s" / INFO_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "orders": [2, 3]}))
    with pytest.raises(SnapshotError, match=r"\[2, 3\] tokens, not of \[1, 2, 3, 5\]"):
        StatisticsDatabase.open(tmp_path / "s")


def test_missing_database_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="no statistics database"):
        StatisticsDatabase.open(tmp_path)
    _build(tmp_path / "s", TEXT)
    os.remove(tmp_path / "s" / TABLE_NAME)
    with pytest.raises(SnapshotError, match="cannot be read"):
        StatisticsDatabase.open(tmp_path / "s")


def test_nothing_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no text"):
        StatisticsBuilder("t", 10).write(tmp_path / "s")


@pytest.mark.parametrize("num_before", [1, 2])
def test_one_database_is_whole_wherever_the_next_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """Before each of the changes to what lies there, and whichever name the table has."""
    for num_calls in itertools.count():
        for _ in range(num_before):
            _build(tmp_path / "s", TEXT)
        calls, is_whole = itertools.count(), False
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, interrupted_at(num_calls, calls, getattr(Path, name)))
            _build(tmp_path / "s", TEXT, TEXT)
            is_whole = True
        database = StatisticsDatabase.open(tmp_path / "s")
        database.verify()
        assert _next(database, [5, 6])[0][1] in ((4,) if is_whole else (2, 4))
        _build(tmp_path / "s", TEXT)
        names = {path.name for path in (tmp_path / "s").iterdir()}
        assert names == {"info.json", "table.bin", "table-2.bin"}  # of which one is the former
        shutil.rmtree(tmp_path / "s")
        if is_whole:
            break
    assert num_calls > 1


def test_what_is_mapped_stays_when_it_is_replaced(tmp_path: Path) -> None:
    database = _build(tmp_path / "s", TEXT)
    for _ in range(2):
        _build(tmp_path / "s", [1, 2])
    assert _next(database, [5, 6]) == [(7, 2), (8, 1)]
    database.verify()


def test_the_file_is_closed_with_the_database(tmp_path: Path) -> None:
    database = _build(tmp_path / "s", TEXT)
    file = database._file
    assert file is not None
    assert not file.closed
    del database
    assert file.closed


def test_rows_age_however_much_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes now and again is kept beside what comes once, and so it is in a build that was
    interrupted."""
    monkeypatch.setattr(statistics_builder, "MAX_STAMP", 500)
    rng = np.random.default_rng(0)
    builder = StatisticsBuilder("t", 30_000, max_bytes=128 << 10)
    while builder.table.size[NUM_ADDED] < 30_000:
        builder.add("once", rng.integers(0, 30_000, 60).tolist() * 3)
    text = rng.integers(0, 30_000, 100).tolist()
    for number in range(60):
        if number == 30:
            builder.write(tmp_path)
            builder = StatisticsBuilder("t", 30_000, max_bytes=128 << 10)
            builder.restore(StatisticsDatabase.open(tmp_path))
        builder.add("again", text)
        builder.add("once", rng.integers(0, 30_000, 300).tolist())
    database = builder.finish()
    found = [_next(database, text[index - 3 : index]) for index in range(3, 100)]
    assert sum(text[3 + index] in dict(counts) for index, counts in enumerate(found)) == 97


def test_size_is_bounded(tmp_path: Path) -> None:
    """A corpus far beyond the bound is counted all the same, the frequent kept."""
    rng = np.random.default_rng(0)
    builder = StatisticsBuilder("t", 60_000, max_bytes=1 << 18)
    for _ in range(100):
        builder.add("corpus", [1, 2, 3, *rng.integers(100, 60_000, 200).tolist()])
    builder.write(tmp_path / "s")
    assert (tmp_path / "s" / TABLE_NAME).stat().st_size <= (1 << 18) + 512
    assert _next(StatisticsDatabase.open(tmp_path / "s"), [1, 2])[0][0] == 3
