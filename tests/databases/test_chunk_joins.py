"""Restarts do not make ever more files, and joining them costs no output, whenever it crashes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from hdserve.databases import output_files, snapshot
from hdserve.databases.output_log import OutputLog
from hdserve.databases.segment import Segment
from tests.databases.stored import Database, no_room


def cursor_of(database: Database, cursor: int = 0) -> int:
    """Where a reader that has read everything since ``cursor`` continues."""
    changes = database.log.changes_since({"n": cursor}, max_bytes=10**6)
    return changes["n"].cursor if changes else cursor


def run(database: Database, *numbers: int) -> Database:
    """One run that appends these, is synced and killed; returns the next one."""
    database.append("n", *numbers)
    assert database.sync()
    return database.restart()


def runs(directory: Path, num_runs: int) -> Database:
    """After so many runs of one output each."""
    database = Database(directory)
    for number in range(num_runs):
        database = run(database, number)
    return database


def test_restarts_do_not_make_ever_more_files(tmp_path):
    """All outputs are there once and in order; nothing counts as lost, to no reader."""
    database, cursor = Database(tmp_path), 0
    for number in range(40):
        database.append("n", number)
        cursor = cursor_of(database, cursor)
        assert database.sync()
        database = database.restart()
        assert database.numbers("n") == list(range(number + 1))
        assert not database.log.partition("n").lacks_end_before(cursor)
        assert not database.store.is_incomplete("n")
        assert database.log.num_bytes == 34 * (number + 1)
    num_full = 40 * 34 // 500
    assert len(database.files(".chunk")) + len(database.files(".log")) <= num_full + 6


def test_what_was_joined_is_deleted_by_the_next_sync(tmp_path):
    database = runs(tmp_path, 4)
    for _ in range(3):
        database.append("n", 4)
        assert database.sync()
    (joined, newest, _) = database.log.partition("n").segments()
    names = {path.stem for path in database.files(".chunk")}
    assert names == {f"{version:016x}" for version, _ in (joined, newest)}
    assert joined[1].sequence_numbers.tolist() == [0, 1, 2]
    assert database.numbers("n") == database.restart().numbers("n") == list(range(5))


@pytest.mark.parametrize("left", list(itertools.product((False, True), repeat=4)))
def test_a_crash_before_all_parts_are_deleted_neither_loses_nor_doubles(tmp_path, left):
    """Whichever parts it leaves; then the next sync deletes them."""
    database = runs(tmp_path, 4)
    parts = {path: path.read_bytes() for path in database.files(".chunk")}
    for number in range(4, 6):
        database.append("n", number)
        assert database.sync()
    is_left = dict(zip(sorted(parts), left, strict=True))
    database.store.close()
    for path, data in parts.items():
        if is_left[path]:
            path.write_bytes(data)
    database = Database(tmp_path)
    assert database.numbers("n") == list(range(6))
    assert database.log.partition("n").num_outputs == 6
    assert not database.store.is_incomplete("n")
    for number in (6, 7):
        database = run(database, number)
    assert len(database.files(".chunk")) <= 5
    assert database.numbers("n") == list(range(8))
    assert database.log.num_bytes == 34 * 8


@pytest.mark.parametrize("name", ["write_file", "replace"])
@pytest.mark.parametrize("num_calls", range(6))
def test_a_kill_in_a_sync_that_joins_costs_nothing(tmp_path, monkeypatch, name, num_calls):
    """Before the joined chunk is written, or behind it."""
    database = runs(tmp_path, 5)
    calls, really = itertools.count(), snapshot.write_file

    def write(path: Path, data: bytes) -> None:
        if name == "replace":
            really(path, data)
        if next(calls) == num_calls:
            raise KeyboardInterrupt
        if name == "write_file":
            really(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "write_file", write)
        for number in range(5, 8):
            database.append("n", number)
            try:
                database.sync()
            except KeyboardInterrupt:
                break
    count = len(database.numbers("n"))
    database = database.restart()
    assert database.numbers("n") == list(range(count))
    assert not database.store.is_incomplete("n")
    database = run(run(database, count), count + 1)
    assert database.numbers("n") == list(range(count + 2))


def test_a_reader_gets_what_it_lacks_wherever_it_had_stopped(tmp_path):
    """Once, as it knows the names of what it has."""
    database = Database(tmp_path)
    cursors = {}
    for number in range(0, 12, 2):
        for each in (number, number + 1):
            database.append("n", each)
            cursors[each] = cursor_of(database)
        assert database.sync()
        database = database.restart()
    for _ in range(2):
        database.append("n", 12)
        assert database.sync()
    assert len(database.log.partition("n").segments()) == 3
    for last, cursor in cursors.items():
        reader = OutputLog(10**6, 10**6)
        outputs = [np.full(5, number, np.uint32) for number in range(last + 1)]
        reader.append("n", Segment.from_outputs("r", 0, outputs))
        change = database.log.changes_since({"n": cursor}, max_bytes=10**6)["n"]
        assert not change.is_flushed
        reader.append("n", change.segment)
        (_, held), *_ = reader.partition("n").segments()
        assert held.sequence_numbers.tolist() == list(range(13))


def test_a_full_disk_keeps_the_parts(tmp_path):
    database = runs(tmp_path, 5)
    with no_room():
        database.append("n", 5)
        for _ in range(3):
            assert not database.sync()
    database = database.restart()
    assert database.numbers("n") == list(range(5))
    database.append("n", 5)
    assert database.sync()
    assert database.restart().numbers("n") == list(range(6))


def test_a_flush_takes_joined_chunks_and_later_runs_go_on(tmp_path):
    database = runs(tmp_path, 5)
    database.log.flush("n")
    database.store.flush("n", database.log)
    for number in range(5, 12):
        database = run(database, number)
        assert not database.store.is_incomplete("n")
        assert database.numbers("n") == list(range(5, number + 1))
    assert len(database.files(".chunk")) <= 5


def test_a_flush_while_parts_are_joined_leaves_nothing(tmp_path, monkeypatch):
    database = runs(tmp_path, 5)
    really = output_files.encode_chunk

    def encode_and_flush(*arguments):
        if not database.log.partition("n").flushed_version:
            database.log.flush("n")
            database.store.flush_later("n")
        return really(*arguments)

    database.append("n", 5)
    with monkeypatch.context() as patch:
        patch.setattr("hdserve.databases.namespace_files.encode_chunk", encode_and_flush)
        assert database.sync()
    assert database.sync()
    assert database.files(".chunk") == []
    assert database.restart().numbers("n") == []


def test_joined_chunks_are_evicted_like_any_other(tmp_path):
    database = Database(tmp_path, max_bytes=2_000)
    for number in range(150):
        database.append("n", number)
        assert database.sync()
        database.store.close()
        database = Database(tmp_path, max_bytes=2_000)
        assert not database.store.is_incomplete("n")
    kept = database.numbers("n")
    assert kept == list(range(kept[0], 150))
    assert 1_300 < database.log.num_bytes <= 2_000
    assert len(database.files(".chunk")) <= 9


@pytest.mark.parametrize("lost", range(3))
def test_a_joined_chunk_that_was_deleted_is_noticed(tmp_path, lost):
    database = Database(tmp_path)
    for number in range(60):
        database = run(database, number)
    for number in range(60, 62):
        database.append("n", number)
        assert database.sync()
    database = database.restart()
    assert not database.store.is_incomplete("n")
    database.files(".chunk")[lost].unlink()
    assert database.restart().store.is_incomplete("n")


def test_nothing_is_joined_where_a_file_could_not_be_used(tmp_path):
    """Joined chunks would tell no more between which others it stood."""
    database = runs(tmp_path, 5)
    path = database.files(".chunk")[1]
    path.write_bytes(b"rotten")
    database = database.restart()
    for number in range(5, 9):
        database = run(database, number)
        assert database.store.is_incomplete("n")
    assert len(database.log.partition("n").chunks) >= 7
