"""What was appended is there after a restart, whatever happened to the process."""

import contextlib
import errno
import fcntl
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hdserve.databases import append_log, output_log, seen_outputs, snapshot
from hdserve.databases.append_log import AppendLog
from hdserve.databases.database_files import DatabaseFiles
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES, OutputLog
from hdserve.databases.segment import Segment
from hdserve.errors import DatabaseError, DatabaseInUse
from tests.databases.stored import (
    KEY,
    Database,
    no_room,
    run_program,
    unreadable,
    without_locks,
)


def test_what_was_appended_is_there_after_a_kill_even_before_a_sync(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.append("other", 7)
    database = database.restart()
    assert database.numbers("n") == list(range(40))
    assert database.numbers("other") == [7]
    database.append("n", 40)
    assert database.restart().numbers("n") == list(range(41))


def test_namespaces_of_which_everything_was_evicted_are_not_brought_back_by_a_sync(
    tmp_path, monkeypatch
):
    """The log forgets them where there are many, so memory does not grow with all that ever were;
    their files go, and what comes of them later is kept."""
    monkeypatch.setattr(output_log, "MIN_CLEARED_PARTITIONS", 8)
    database = Database(tmp_path, max_bytes=1000)
    database.log.flush("flushed")
    database.store.flush("flushed", database.log)
    for number in range(200):
        database.append(f"tenant-{number}", number)
        database.sync()
    database.sync()
    kept = set(database.log.namespaces())
    assert len(kept) <= 64
    assert "flushed" in kept
    assert len(database.store._files.namespaces) <= len(kept)
    assert sum(1 for name in kept if database.numbers(name)) == len(database.files(".log"))
    database.append("tenant-0", 1000)
    found = {name: database.numbers(name) for name in kept | {"tenant-0"}}
    database.sync()
    database = database.restart()
    assert {name: database.numbers(name) for name in found} == found
    assert database.log.partition("flushed").flushed_version


def test_a_sync_passes_over_what_was_flushed_and_is_empty(tmp_path):
    """There is one such namespace for each deletion there ever was."""
    database = Database(tmp_path)
    for number in range(10):
        database.append(f"n{number}", number)
        database.log.flush(f"n{number}")
        database.store.flush(f"n{number}", database.log)
    database.append("other", 1)
    assert database.sync()
    assert list(database.store._files.namespaces) == ["other"]
    database.append("n3", 3, 4)
    database = database.restart()
    assert (database.numbers("n3"), database.numbers("n2")) == ([4], [])
    assert database.log.partition("n2").flushed_version


def test_a_volume_without_locks_cannot_be_written(tmp_path, monkeypatch):
    """A file in place of a lock would stay behind a process that is killed, and keep those of
    other nodes from writing for ever."""
    database = Database(tmp_path)
    database.append("n", 1)
    database.store.close()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    database = Database(tmp_path)
    assert database.numbers("n") == [1]
    with pytest.raises(DatabaseError, match=r"cannot be written.*not implemented"):
        database.store.check_writable()


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 50])
def test_a_log_that_was_killed_in_its_head_is_none(tmp_path, num_bytes):
    """As nothing was in it, nothing is refused, which an operator would be told of."""
    database = Database(tmp_path)
    database.append("n", 1)
    (log,) = database.files(".log")
    os.truncate(log, num_bytes)
    database = database.restart()
    assert database.store.num_refused == 0
    assert not log.exists()
    database.append("n", 2)
    assert database.restart().numbers("n") == [2]


def test_full_chunks_become_snapshots_and_the_tail_stays_a_log(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    assert (len(database.files(".chunk")), len(database.files(".log"))) == (0, 3)
    assert database.sync()
    assert (len(database.files(".chunk")), len(database.files(".log"))) == (2, 1)
    database = database.restart()
    assert database.numbers("n") == list(range(40))
    assert database.sync()
    assert (len(database.files(".chunk")), len(database.files(".log"))) == (3, 0)
    assert database.restart().numbers("n") == list(range(40))


def test_evicted_outputs_leave_the_disk(tmp_path):
    database = Database(tmp_path, max_bytes=2_000)
    for start in range(0, 500, 50):
        database.append("n", *range(start, start + 50))
        assert database.sync()
    kept = database.numbers("n")
    size = sum(path.stat().st_size for path in database.files(""))
    assert size < 10_000
    assert database.restart().numbers("n") == kept


def test_what_was_evicted_after_a_flush_is_not_imported_as_new_after_a_restart(tmp_path):
    """As without a restart: it would take the place of what is newer."""
    database = Database(tmp_path, max_bytes=2_000)
    database.append("n", 0)
    database.log.flush("n")
    database.store.flush("n", database.log)
    database.append("n", *range(1, 200))
    assert database.sync()
    for each in (database, database.restart()):
        partition = each.log.partition("n")
        evicted = Segment.from_outputs("r", 1, [np.full(5, 1, np.uint32)])
        assert 1 not in each.numbers("n")
        assert list(partition.append(partition.as_imported(evicted))) == []


def test_what_was_evicted_is_known_after_a_restart_however_many_origins_are_kept(
    tmp_path, monkeypatch
):
    """A reader may still have it, and would give it back as new."""
    monkeypatch.setattr(seen_outputs, "MAX_ORIGINS", 5)
    database = Database(tmp_path, max_bytes=2_000)
    for number in range(10):
        for origin in range(20):
            made = Segment.from_outputs(f"r{origin}", number, [np.full(1, 1, np.uint32)])
            for appended in database.log.append("n", made):
                database.store.append("n", appended)
    assert database.sync()
    for each in (database, database.restart()):
        partition = each.log.partition("n")
        assert partition.num_outputs < 200
        assert partition.seen() == {f"r{origin}": [(0, 10)] for origin in range(20)}


def test_what_was_evicted_is_known_where_more_is_evicted_at_a_restart(tmp_path, monkeypatch):
    """The limit is lower now, and what is kept of the same origins is restored last."""
    origins = [f"r{number}" for number in range(20)]
    database = Database(tmp_path, max_bytes=2_000)
    names = [(origin, 0) for origin in origins]
    names += [("other", number) for number in range(100)]
    names += [(origin, 1) for origin in origins]
    for origin, number in names:
        made = Segment.from_outputs(origin, number, [np.full(1, 1, np.uint32)])
        for appended in database.log.append("n", made):
            database.store.append("n", appended)
    seen = database.log.partition("n").seen()
    assert database.sync()
    database.store.close()
    monkeypatch.setattr(seen_outputs, "MAX_ORIGINS", 5)
    lower = Database(tmp_path, max_bytes=900)
    assert lower.log.num_bytes < 900 < database.log.num_bytes
    assert lower.log.partition("n").seen() == seen


def test_versions_go_on_above_all_that_were_given(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    cursor = database.log.changes_since({"n": 0}, max_bytes=10**6)["n"].cursor
    first_epoch = database.store.epoch
    database = database.restart()
    assert first_epoch in database.store.epochs
    assert database.store.epoch != first_epoch
    database.append("n", 40)
    change = database.log.changes_since({"n": cursor}, max_bytes=10**6)["n"]
    assert change.segment.sequence_numbers.tolist() == [40]


def test_a_lost_generation_file_does_not_reuse_versions(tmp_path):
    database = Database(tmp_path)
    database.append("n", 1)
    (tmp_path / "generation").unlink()
    restarted = database.restart()
    assert restarted.store.first_version > database.store.first_version
    assert restarted.store.epochs == ()


def test_calibration_and_flush_survive(tmp_path):
    database = Database(tmp_path)
    database.append("n", 1, 2)
    database.append("other", 3)
    database.log.set_calibration("other", b"state")
    database.store.state_changed("other")
    database.sync()
    cursor = database.log.changes_since({"n": 0}, max_bytes=10**6)["n"].cursor
    database.log.flush("n")
    database.store.flush("n", database.log)
    database = database.restart()
    assert database.numbers("n") == []
    assert database.log.changes_since({"n": cursor}, max_bytes=10**6)["n"].is_flushed
    other = database.log.changes_since({"other": 0}, max_bytes=10**6)["other"]
    assert other.calibration == b"state"
    assert database.numbers("other") == [3]


def test_a_calibration_that_gave_way_leaves_the_disk(tmp_path):
    """With its namespace, where nothing else is left of it; also where a lower limit is new."""
    state, tenants = bytes(MAX_CALIBRATION_BYTES // 4), [f"tenant-{number}" for number in range(8)]
    database = Database(tmp_path, max_bytes=10**7)
    database.append("tenant-0", 1)
    for tenant in tenants:
        database.store.state_changed(*database.log.set_calibration(tenant, state))
    assert database.sync()
    assert len(database.files("state")) == 8
    database.store.close()
    database = Database(tmp_path, max_bytes=2**19)
    num_kept = sum(bool(database.log.partition(name).calibration) for name in tenants)
    assert num_kept == 4
    for tenant in (None, "new"):
        if tenant:
            database.store.state_changed(*database.log.set_calibration(tenant, state))
        assert database.sync()
        assert sum(path.stat().st_size > len(state) for path in database.files("state")) == 4
    directories = {path for path in tmp_path.iterdir() if path.is_dir()}
    assert directories == {path.parent for path in database.files("")}
    assert database.restart().numbers("tenant-0") == [1]


def test_files_that_a_crash_in_a_flush_left_behind_are_not_read_again(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.sync()
    outputs = [*database.files(".chunk"), *database.files(".log")]
    kept = {path: path.read_bytes() for path in outputs}
    database.log.flush("n")
    database.store.flush("n", database.log)
    for path, data in kept.items():
        path.write_bytes(data)
    database = database.restart()
    assert database.numbers("n") == []
    assert database.files(".chunk") == database.files(".log") == []


def test_a_second_process_reads_and_does_not_write(tmp_path, caplog):
    database = Database(tmp_path)
    database.append("n", 1, 2)
    before = {path: path.read_bytes() for path in database.files("")}
    second = Database(tmp_path)
    assert "in use by another process" in caplog.text
    assert not second.store.is_writable
    assert second.numbers("n") == [1, 2]
    second.append("n", 3)
    assert second.numbers("n") == [1, 2, 3]
    assert not second.sync()
    with pytest.raises(DatabaseError, match="in use"):
        second.store.flush("n", second.log)
    assert {path: path.read_bytes() for path in database.files("")} == before


def test_a_successor_takes_over_when_its_predecessor_ends(tmp_path):
    """What both have appended meanwhile is there after a restart, and nothing was overwritten."""
    first = Database(tmp_path)
    first.append("n", *range(40))
    second = Database(tmp_path)
    second.append("n", *range(50, 90))
    second.append("m", 7)
    first.append("n", 40)
    assert not second.sync()
    first.sync()
    first.store.close()
    assert not first.sync()
    assert second.sync()
    second.append("n", 90)
    third = second.restart()
    assert sorted(third.numbers("n")) == [*range(41), *range(50, 91)]
    assert third.numbers("m") == [7]
    assert third.sync()


def test_a_successor_takes_over_though_its_predecessor_was_restarted(tmp_path):
    """What that wrote since is left as it is."""
    first = Database(tmp_path)
    first.append("n", 1)
    second = Database(tmp_path)
    second.append("n", 2)
    first = first.restart()
    first.append("n", 3)
    first.store.close()
    assert second.sync()
    second.append("n", 4)
    assert sorted(second.restart().numbers("n")) == [1, 2, 3, 4]


def test_a_successor_keeps_the_log_of_which_it_could_read_a_part(tmp_path):
    """As on NFS, where what another machine is writing may end in zeros."""
    first = Database(tmp_path)
    first.append("n", 1, 2)
    (path,) = first.files(".log")
    part = path.read_bytes()
    first.append("n", 3)
    whole = path.read_bytes()
    path.write_bytes(part + bytes(len(whole) - len(part)))
    second = Database(tmp_path)
    path.write_bytes(whole)
    second.append("n", 4)
    first.store.close()
    assert second.sync()
    assert sorted(second.restart().numbers("n")) == [1, 2, 3, 4]


def test_what_was_flushed_while_a_successor_waited_stays_flushed(tmp_path):
    """In its memory, for its readers and on the disk; other namespaces keep what they have."""
    first = Database(tmp_path)
    first.append("n", 1)
    first.append("m", 7)
    second = Database(tmp_path)
    second.append("n", 2)
    second.append("m", 8)
    first = first.restart()
    first.log.flush("n")
    first.store.flush("n", first.log)
    flushed_version = first.log.partition("n").flushed_version
    first.store.close()
    assert second.sync()
    assert second.numbers("n") == []
    assert second.log.partition("n").flushed_version > flushed_version
    second.append("n", 3)
    second = second.restart()
    assert (second.numbers("n"), sorted(second.numbers("m"))) == ([3], [7, 8])
    assert second.log.partition("n").flushed_version > flushed_version


def test_a_successor_that_waits_forgets_what_is_flushed(tmp_path):
    """Once, with its next sync; what comes after that stays, though it had flushed it, too."""
    first = Database(tmp_path)
    first.append("n", 1)
    first.append("m", 7)
    second = Database(tmp_path)
    second.log.flush("n")
    with pytest.raises(
        DatabaseInUse, match="namespace n was forgotten in memory, but another process"
    ):
        second.store.flush("n", second.log)
    second.append("n", 2)
    assert not second.sync()
    assert second.numbers("n") == [2]
    first.log.flush("n")
    first.store.flush("n", first.log)
    assert not second.sync()
    assert (second.numbers("n"), second.numbers("m")) == ([], [7])
    second.append("n", 3)
    assert not second.sync()
    first.store.close()
    assert second.sync()
    second = second.restart()
    assert (second.numbers("n"), second.numbers("m")) == ([3], [7])


def test_a_successor_takes_what_its_predecessor_adds_after_a_flush(tmp_path):
    """For its readers, too; the files of it go, as they are older than the flush has become."""
    first = Database(tmp_path)
    first.append("n", 1)
    second = Database(tmp_path)
    second.append("n", 2)
    first.log.flush("n")
    first.store.flush("n", first.log)
    assert not second.sync()
    second.append("n", 3)
    cursor = second.log.changes_since({"n": 0}, max_bytes=10**6)["n"].cursor
    first.append("n", *range(10, 50))
    first.sync()
    first.append("n", 50)
    first.store.close()
    assert second.sync()
    change = second.log.changes_since({"n": cursor}, max_bytes=10**6)["n"]
    assert change.segment.sequence_numbers.tolist() == list(range(10, 51))
    assert not change.is_flushed
    assert second.numbers("n") == second.restart().numbers("n") == [3, *range(10, 51)]


def test_what_a_successor_flushed_outlives_what_its_predecessor_flushed_later(tmp_path):
    """Nothing in its memory from before either comes back."""
    first = Database(tmp_path)
    second = Database(tmp_path)
    second.log.flush("n")
    second.append("n", 2)
    first.log.flush("n")
    first.store.flush("n", first.log)
    first.store.close()
    assert second.sync()
    assert second.restart().numbers("n") == []


def test_a_flush_that_cannot_be_read_is_taken_when_it_can(tmp_path):
    """Until then nothing is written, and that counts as a failure."""
    first = Database(tmp_path)
    first.append("n", 1)
    second = Database(tmp_path)
    first.log.flush("n")
    first.store.flush("n", first.log)
    first.store.close()
    with unreadable("state"):
        assert not second.sync()
    assert (second.numbers("n"), second.store.num_failures) == ([1], 1)
    assert second.sync()
    assert second.numbers("n") == []


def test_what_is_in_the_way_is_said_as_it_is_now(tmp_path):
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    second = Database(obstacle / "database")
    with pytest.raises(DatabaseError, match="Not a directory"):
        second.store.check_writable()
    obstacle.unlink()
    first = Database(obstacle / "database")
    assert not second.sync()
    with pytest.raises(DatabaseError, match="in use by another process"):
        second.store.check_writable()
    first.store.close()


def test_of_two_successors_one_writes_and_the_other_is_opened_anew(tmp_path, caplog):
    """The numbers of both are the same, and no file of the one is touched by the other."""
    first = Database(tmp_path)
    second, third = Database(tmp_path), Database(tmp_path)
    first.append("n", 1)
    second.append("n", 2)
    third.append("n", 3)
    first.store.close()
    assert second.sync()
    assert not third.sync()
    assert not third.store.is_overtaken
    second.store.close()
    before = {path: path.read_bytes() for path in first.files("")}
    assert not third.sync()
    assert third.store.is_overtaken
    assert "was written by another process meanwhile" in caplog.text
    with pytest.raises(DatabaseError, match="must be opened again"):
        third.store.check_writable()
    assert {path: path.read_bytes() for path in first.files("")} == before
    third = third.restart()
    assert third.store.generation > second.store.generation
    third.append("n", 3)
    assert third.restart().numbers("n") == [1, 2, 3]


def test_a_successor_is_overtaken_though_the_number_of_who_did_it_is_lost(tmp_path):
    """The files that it wrote tell of it."""
    first = Database(tmp_path)
    second, third = Database(tmp_path), Database(tmp_path)
    second.append("n", 2)
    third.append("n", 3)
    first.store.close()
    assert second.sync()
    second.store.close()
    (tmp_path / "generation").unlink()
    assert not third.sync()
    assert third.store.is_overtaken
    assert third.restart().numbers("n") == [2]


def test_a_flush_that_could_not_reach_the_disk_is_made_good(tmp_path):
    """The predecessor's files go when it ends, with what it had set aside; what came after the
    flush stays."""
    first = Database(tmp_path)
    first.append("n", *range(40))
    first.sync()
    first.files(".chunk")[0].with_suffix(".refused").write_bytes(b"")
    second = Database(tmp_path)
    second.log.flush("n")
    with pytest.raises(DatabaseError, match="in use"):
        second.store.flush("n", second.log)
    second.append("n", *range(50, 90))
    first.store.close()
    assert second.sync()
    assert second.files(".refused") == []
    assert second.restart().numbers("n") == list(range(50, 90))


def test_a_flush_is_repeated_when_files_could_not_be_deleted(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    obstacle = database.files(".log")[0].parent / "obstacle"
    obstacle.mkdir()
    database.log.flush("n")
    with pytest.raises(DatabaseError, match="cannot be deleted"):
        database.store.flush("n", database.log)
    database.append("n", 40)
    assert not database.sync()
    obstacle.rmdir()
    assert database.sync()
    assert [path.suffix for path in database.files("")] == [".log", ""]
    assert database.restart().numbers("n") == [40]


class LogOfASlowReader(OutputLog):
    """A writer goes on while its files are read."""

    def __init__(self, writer: Database) -> None:
        super().__init__(10**6, 10**6)
        self._writer = writer

    def restore(self, namespace: str, first_version: int, segment: Segment) -> None:
        if not self.partition(namespace).num_outputs:
            self._writer.append("n", *range(60, 120))
            self._writer.sync()
        super().restore(namespace, first_version, segment)


def test_a_log_that_becomes_a_chunk_while_it_is_read_is_not_lost(tmp_path):
    writer = Database(tmp_path)
    writer.append("n", *range(60))
    writer.sync()
    (tail,) = writer.files(".log")
    log = LogOfASlowReader(writer)
    reader = DatabaseFiles(tmp_path, KEY)
    reader.restore(log)
    assert not tail.exists()
    assert log.partition("n").num_outputs >= 60
    assert reader.num_refused == 0


def test_an_evicted_file_is_no_refused_one_to_a_reader(tmp_path):
    writer = Database(tmp_path, max_bytes=3000)
    writer.append("n", *range(60))
    writer.sync()
    reader = DatabaseFiles(tmp_path, KEY)
    reader.restore(LogOfASlowReader(writer))
    assert reader.num_refused == 0


def test_a_directory_that_cannot_be_made_is_made_when_it_can(tmp_path):
    """What comes before that is kept in memory, and then there."""
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    database = Database(obstacle / "database")
    database.append("n", 1, 2)
    assert not database.sync()
    with pytest.raises(DatabaseError, match=r"cannot be written: \[Errno"):
        database.store.check_writable()
    obstacle.unlink()
    assert database.sync()
    database.append("n", 3)
    assert database.restart().numbers("n") == [1, 2, 3]


@contextlib.contextmanager
def no_lock(directory: Path) -> Iterator[None]:
    """Opening the lock fails, as on a disk that is mounted read-only."""
    lock = directory / "lock"
    lock.unlink()
    lock.mkdir()
    try:
        yield
    finally:
        lock.rmdir()


@pytest.mark.parametrize("obstacle", [no_lock, no_room])
def test_what_is_kept_is_read_where_nothing_can_be_written(tmp_path, obstacle):
    """When it can, all that came meanwhile is."""
    database = Database(tmp_path)
    database.append("n", 1, 2)
    database.store.close()
    with obstacle(tmp_path):
        database = Database(tmp_path)
        numbers = database.numbers("n")
        database.append("n", 3)
        is_writable, num_failures = database.store.is_writable, database.store.num_failures
        is_synced = database.sync()
    assert numbers == [1, 2]
    assert (is_writable, num_failures, is_synced) == (False, 1, False)
    with pytest.raises(DatabaseError, match="cannot be written"):
        database.store.check_writable()
    assert database.sync()
    database.append("n", 4)
    assert database.restart().numbers("n") == [1, 2, 3, 4]


def test_each_outage_of_the_disk_is_logged_once_and_so_is_its_end(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    database = Database(tmp_path)
    for number in (0, 10):
        with no_room():
            database.append("n", number, number + 1)
            assert not database.sync()
            assert not database.sync()
        assert database.sync()
        assert database.sync()
    fails, ends = "cannot be written, going on in memory", "is written again"
    told = [next(part for part in (fails, ends) if part in text) for text in caplog.messages]
    assert told == [fails, ends] * 2
    assert database.restart().numbers("n") == [0, 1, 10, 11]


def test_what_could_not_be_written_during_a_sync_is_not_said_to_be(tmp_path, monkeypatch):
    database = Database(tmp_path)
    database.append("n", 1)
    sync = AppendLog.sync

    def interrupted(log: AppendLog) -> None:
        sync(log)
        with no_room():
            database.append("other", 2)

    monkeypatch.setattr(AppendLog, "sync", interrupted)
    database.sync()
    assert database.store.is_failing
    monkeypatch.undo()
    assert database.sync()
    assert not database.store.is_failing
    assert database.restart().numbers("other") == [2]


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_while_snapshots_are_written_loses_nothing_acknowledged(tmp_path, seed):
    program = """
import sys
from pathlib import Path
from tests.databases.stored import Database

database = Database(Path(sys.argv[1]), max_bytes=10**8)
for number in range(10**6):
    database.append("n", number, length=20)
    print(number, flush=True)
    if number % 3 == 0:
        database.sync()
"""
    process = run_program(program, str(tmp_path))
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.05, 0.4))
    os.kill(process.pid, signal.SIGKILL)
    *complete, _ = (first + process.communicate()[0]).split("\n")
    acknowledged = int(complete[-1])
    database = Database(tmp_path, max_bytes=10**8)
    numbers = database.numbers("n")
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > acknowledged
    assert database.store.num_refused == 0
    assert not list(tmp_path.glob("*/.*.tmp"))


def test_every_file_is_private(tmp_path):
    database = Database(tmp_path / "new")
    database.append("n", *range(40))
    database.sync()
    paths = [path for path in (tmp_path / "new").rglob("*") if path.name != "lock"]
    assert paths
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def test_the_snapshot_of_a_chunk_is_an_envelope_like_any_other(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.sync()
    path = database.files(".chunk")[0]
    payload = snapshot.read_file(path, kind="chunk", key=KEY)
    assert payload["namespace"] == "n"


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    database = Database(tmp_path)
    database.append("n", 1)
    left = [tmp_path / ".generation.123.tmp", *(path / ".s.tmp" for path in tmp_path.glob("*/"))]
    for path in left:
        path.write_bytes(b"half")
    assert len(left) > 1
    assert database.restart().numbers("n") == [1]
    assert not any(path.exists() for path in left)


def open_files(directory: Path) -> list[str]:
    """Of this process below ``directory``; those that were deleted say so."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(str(directory)) and ".log" in path]


def test_a_log_stays_open_between_appends_and_no_longer_than_it_is_there(tmp_path, monkeypatch):
    """On network storage it would cost each message a wait for the server's disk."""
    database, num_opened = Database(tmp_path), 0
    really_open = os.open

    def counted(path, *arguments):
        nonlocal num_opened
        num_opened += str(path).endswith(".log")
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", counted)
    for number in range(3):
        database.append("n", number)
    assert num_opened == 1
    assert len(open_files(tmp_path)) == 1
    assert database.sync()
    assert open_files(tmp_path) == []
    database.append("n", *range(3, 60))
    database.append("other", 1)
    assert len(open_files(tmp_path)) > 2
    database.log.flush("n")
    database.store.flush("n", database.log)
    (path,) = open_files(tmp_path)
    assert path == str(database.files(".log")[0])
    database.append("n", 100)
    database.store.close()
    assert open_files(tmp_path) == []
    database = Database(tmp_path)
    assert (database.numbers("n"), database.numbers("other")) == ([100], [1])


def test_only_so_many_logs_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(append_log, "MAX_OPEN_LOGS", 5)
    database = Database(tmp_path)
    for number in range(3):
        for tenant in range(20):
            database.append(f"tenant-{tenant}", number)
    assert len(open_files(tmp_path)) == 5
    database = database.restart()
    assert all(database.numbers(f"tenant-{tenant}") == [0, 1, 2] for tenant in range(20))


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_log_that_somebody_has_deleted_is_written_again(tmp_path, is_synced):
    """From memory, whether it was open then or not."""
    database = Database(tmp_path)
    database.append("n", 1)
    assert not is_synced or database.sync()
    database.files(".log")[0].unlink()
    database.append("n", 2)
    while not database.sync():
        pass
    assert database.restart().numbers("n") == [1, 2]


def test_a_log_of_which_something_is_lost_when_it_is_closed_is_written_again(tmp_path, monkeypatch):
    """As network storage says only then that its disk is full."""
    database = Database(tmp_path)
    database.append("n", 1)
    (path,) = database.files(".log")
    really_close = os.close

    def lose(descriptor):
        is_log = os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
        if is_log:
            os.truncate(path, 0)
        really_close(descriptor)
        if is_log:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lose)
        database.sync()
    assert database.store.num_failures == 1
    assert database.sync()
    assert database.restart().numbers("n") == [1]
