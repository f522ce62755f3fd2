"""Damaged and foreign files, and a full disk, cost as little as they can."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import append_log, segment, snapshot
from hdserve.databases.append_log import AppendLog, read_records
from hdserve.databases.output_log import OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, SnapshotError
from tests.databases.stored import KEY, Database, run_program, unreadable


def damage_file(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        del data[-30:]
    elif damage == "bit-flipped":
        data[len(data) // 2] ^= 4
    elif damage == "empty":
        data.clear()
    else:
        version = data.index(b"version") + len("version")
        data[version] = {"newer": 9, "older": 0}[damage]
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("truncated", "truncated or corrupt"),
        ("bit-flipped", "corrupt"),
        ("empty", "truncated or corrupt"),
        ("newer", "format version 9 is newer than 1, which this program reads: use the hdserve"),
        ("older", "format version 0 is older than 1, which this program reads: export it with"),
    ],
)
def test_a_damaged_snapshot_is_refused_and_set_aside(tmp_path, caplog, damage, reason):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.sync()
    path = database.files(".chunk")[0]
    damage_file(path, damage)
    with caplog.at_level(logging.ERROR):
        database = database.restart()
    assert reason in caplog.text
    assert str(path) in caplog.text
    assert path.with_name(f"{path.name}.refused").exists()
    assert not path.exists()
    assert database.store.num_refused == 1
    assert database.numbers("n") == list(range(14, 40))
    database.append("n", 40)
    assert database.restart().numbers("n") == list(range(14, 41))


@pytest.mark.parametrize("lost", range(4))
def test_a_chunk_that_was_deleted_is_noticed_wherever_it_stood(tmp_path, lost):
    """Also the last of a run, behind which the next one began to number anew."""
    database = Database(tmp_path)
    for first in (0, 100):
        database.append("n", *range(first, first + 20))
        database.sync()
        database = database.restart()
        database.sync()
    database.append("n", 200)
    database = database.restart()
    assert not database.store.is_incomplete("n")
    assert len(database.files(".chunk")) == 4
    database.files(".chunk")[lost].unlink()
    for _ in range(2):
        database = database.restart()
        assert database.store.is_incomplete("n")


def test_what_was_evicted_or_flushed_is_not_missed(tmp_path):
    """Though it was the last of a run."""
    database = Database(tmp_path, max_bytes=2_000)
    for first in range(0, 500, 10):
        database.append("n", *range(first, first + 9))
        database.append("flushed", *range(first, first + 9))
        assert database.sync()
        if first == 300:
            database.log.flush("flushed")
            database.store.flush("flushed", database.log)
        database.store.close()
        database = Database(tmp_path, max_bytes=2_000)
        assert not database.store.is_incomplete("n")
        assert not database.store.is_incomplete("flushed")
    assert min(database.numbers("n")) > 300


def test_a_damaged_chunk_whose_log_is_still_there_costs_nothing(tmp_path):
    """As a crash leaves them, between the writing of the one and the deletion of the other."""
    database = Database(tmp_path)
    database.append("n", *range(5))
    (log,) = database.files(".log")
    content = log.read_bytes()
    database = database.restart()
    assert database.sync()
    (chunk,) = database.files(".chunk")
    log.write_bytes(content)
    damage_file(chunk, "bit-flipped")
    database = database.restart()
    assert database.numbers("n") == list(range(5))
    assert database.sync()
    assert database.restart().numbers("n") == list(range(5))


def test_a_chunk_that_could_not_be_read_is_there_at_the_next_start(tmp_path, caplog):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.sync()
    oldest = database.files(".chunk")[0]
    with unreadable(oldest.name):
        database = database.restart()
    assert database.numbers("n") == list(range(14, 40))
    assert database.store.num_refused == 1
    assert f"cannot read {oldest}" in caplog.text
    database.append("n", 40)
    assert database.sync()
    database = database.restart()
    assert database.numbers("n") == list(range(41))
    assert database.store.num_refused == 0


@pytest.mark.parametrize("name", ["state", "generation"])
def test_nothing_is_begun_without_what_cannot_be_read_now(tmp_path, name):
    """Numbers would be used twice, and what was flushed be forgotten."""
    database = Database(tmp_path)
    database.log.flush("n")
    database.store.flush("n", database.log)
    database.append("n", 1)
    database.store.close()
    with unreadable(name), pytest.raises(DatabaseError, match="Too many open files"):
        Database(tmp_path)
    again = Database(tmp_path)
    assert again.numbers("n") == [1]
    assert again.log.partition("n").flushed_version == database.log.partition("n").flushed_version
    assert database.store.epoch in again.store.epochs
    assert not list(tmp_path.rglob("*.refused"))


def test_what_the_disk_could_not_take_is_written_again_whole(tmp_path, monkeypatch):
    """A failed fsync may drop what it was to write, and the next one then succeeds."""
    database = Database(tmp_path)
    database.append("n", *range(5))
    assert database.files(".log")
    with monkeypatch.context() as patch:
        patch.setattr(AppendLog, "sync", _drop)
        assert not database.sync()
    assert database.sync()
    assert database.restart().numbers("n") == list(range(5))


def test_what_an_earlier_run_wrote_is_on_the_disk_before_what_comes_next(tmp_path, monkeypatch):
    """A power failure never takes it and leaves the later: whoever has that would seem to have
    missed nothing."""
    database = Database(tmp_path)
    database.append("n", *range(5))
    database.append("m", 5)
    logs = database.files(".log")
    synced: list[Path] = []
    monkeypatch.setattr(AppendLog, "sync", lambda log: synced.append(log.path))
    database = database.restart()
    assert sorted(synced) == logs
    assert database.numbers("n") == list(range(5))


def test_an_earlier_log_that_the_disk_could_not_take_is_written_again_whole(tmp_path, monkeypatch):
    database = Database(tmp_path)
    database.append("n", *range(5))
    with monkeypatch.context() as patch:
        patch.setattr(AppendLog, "sync", _drop)
        database = database.restart()
    assert database.store.num_failures == 1
    assert database.sync()
    assert database.restart().numbers("n") == list(range(5))


def _drop(log: AppendLog) -> None:
    log.path.write_bytes(bytes(log.path.stat().st_size))
    raise OSError("the disk is broken")


def test_no_file_that_was_set_aside_is_overwritten(tmp_path):
    """A state that was written anew and cannot be used either."""
    database = Database(tmp_path)
    database.append("n", 1)
    (log,) = database.files(".log")
    for number in range(3):
        log.with_name("state").write_bytes(b"junk %d" % number)
        database = database.restart()
    names = ("state.refused", "state.refused-2", "state.refused-3")
    kept = [log.with_name(name).read_bytes() for name in names]
    assert kept == [b"junk 0", b"junk 1", b"junk 2"]
    database.log.flush("n")
    database.store.flush("n", database.log)
    assert [path.name for path in log.parent.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (DatabaseKey("a-model", "0" * 32), "made with another tokenizer"),
        (DatabaseKey("b-model", "f" * 32), "of the model 'a-model', not of 'b-model'"),
    ],
)
def test_files_of_another_database_are_refused_and_it_starts_empty(tmp_path, caplog, key, reason):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.log.set_calibration("n", b"state")
    database.store.state_changed("n")
    database.sync()
    database.store.close()
    foreign = Database(tmp_path, key)
    assert reason in caplog.text
    assert foreign.log.num_bytes == 0
    assert foreign.log.changes_since({"n": 0}, max_bytes=10**6) == {}
    foreign.append("n", 5)
    assert foreign.restart().numbers("n") == [5]


def test_a_file_moved_to_another_namespace_is_refused(tmp_path, caplog):
    database = Database(tmp_path)
    database.append("n", 1)
    database.append("other", 2)
    first, second = database.files(".log")
    second.write_bytes(first.read_bytes())
    database = database.restart()
    assert "a file of another namespace" in caplog.text
    assert len(database.numbers("n") + database.numbers("other")) == 1


def test_a_record_cut_short_by_a_crash_is_left_out(tmp_path, caplog):
    database = Database(tmp_path)
    database.append("n", 1, 2, 3)
    (path,) = database.files(".log")
    path.write_bytes(path.read_bytes()[:-1])
    database = database.restart()
    assert "incomplete record" in caplog.text
    assert database.numbers("n") == [1, 2]
    assert database.store.num_refused == 0
    database.sync()
    assert database.restart().numbers("n") == [1, 2]


def test_a_corrupt_record_ends_its_log_and_the_intact_part_is_kept(tmp_path, caplog):
    database = Database(tmp_path)
    database.append("n", 1, 2, 3)
    (path,) = database.files(".log")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(bytes(data))
    database = database.restart()
    assert "the checksum is wrong" in caplog.text
    assert path.with_name(f"{path.name}.refused").exists()
    assert database.numbers("n") == [1, 2]
    assert database.restart().numbers("n") == [1, 2]


@pytest.mark.parametrize("num_after", [0, 2])
def test_a_wrong_length_is_no_record_that_was_cut_short(tmp_path, caplog, num_after):
    """What follows is set aside, and asked back where there is a replica that has it."""
    database = Database(tmp_path)
    database.append("n", 1, 2)
    (path,) = database.files(".log")
    size = path.stat().st_size
    database.append("n", *range(3, 4 + num_after))
    data = bytearray(path.read_bytes())
    data[size + 1] ^= 0x40
    path.write_bytes(bytes(data))
    database = database.restart()
    assert "the length is wrong" in caplog.text
    assert database.store.num_refused == 1
    assert path.with_name(f"{path.name}.refused").read_bytes() == data
    assert database.numbers("n") == [1, 2]


@pytest.mark.parametrize("call", ["_rescue", "set_aside", "_sync_logs"])
def test_the_intact_part_of_a_log_outlives_a_kill_while_it_is_restored(tmp_path, monkeypatch, call):
    """It is written elsewhere before the log is set aside."""

    def be_killed(*_: object) -> None:
        raise KeyboardInterrupt

    database = Database(tmp_path)
    database.append("n", 1, 2, 3)
    database.store.close()
    (path,) = database.files(".log")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(bytes(data))
    store = OutputStore(tmp_path, KEY)
    log = OutputLog(10**6, 10**6, first_version=store.first_version)
    with monkeypatch.context() as patch:
        patch.setattr(store._files, call, be_killed)
        with pytest.raises(KeyboardInterrupt):
            store.restore(log)
    store.close()
    database = Database(tmp_path)
    assert database.numbers("n") == [1, 2]
    database.append("n", 4)
    assert database.restart().numbers("n") == [1, 2, 4]


@pytest.mark.parametrize("num_zeros", [1, 8, 4096])
def test_zeros_at_the_end_of_a_log_cost_nothing_that_stands_before_them(tmp_path, num_zeros):
    """As a power failure leaves a file whose size was on the disk before its data."""
    database = Database(tmp_path)
    database.append("n", 1, 2, 3)
    (path,) = database.files(".log")
    path.write_bytes(path.read_bytes() + bytes(num_zeros))
    database = database.restart()
    assert database.numbers("n") == [1, 2, 3]
    assert database.restart().numbers("n") == [1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_damage_to_an_append_log_goes_unnoticed_or_raises(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log") / "file"
    bodies = data.draw(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5))
    log = AppendLog(path)
    for body in bodies:
        log.append(body)
    log.sync()
    assert read_records(path, 10**6).bodies == bodies
    damaged = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        del damaged[index:]
    else:
        damaged[index] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(damaged))
    records = read_records(path, 10**6)
    assert records.bodies == bodies[: len(records.bodies)]
    assert len(records.bodies) < len(bodies)
    is_cut_between_records = not records.is_torn and not records.error
    assert not is_cut_between_records or len(damaged) == sum(
        8 + len(body) for body in records.bodies
    )


def test_the_records_of_a_log_are_checked_together(tmp_path, monkeypatch):
    """There may be a million of them at a start."""
    database = Database(tmp_path)
    database.append("n", *range(20))
    checked: list[int] = []
    check = segment._checked

    def counted(origins, columns):
        checked.append(len(origins))
        return check(origins, columns)

    monkeypatch.setattr(segment, "_checked", counted)
    num_records = [len(read_records(path, 10**6).bodies) - 1 for path in database.files(".log")]
    assert database.restart().numbers("n") == list(range(20))
    assert checked == num_records


def test_a_record_that_did_not_fit_leaves_the_log_as_it_was(tmp_path):
    program = """
import resource, signal, sys
from pathlib import Path
from hdserve.databases.append_log import AppendLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
log = AppendLog(Path(sys.argv[1]))
log.append(b"first")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
try:
    log.append(bytes(2000))
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    log.append(b"second")
"""
    process = run_program(program, str(tmp_path / "log"))
    process.communicate()
    assert process.returncode == 0
    records = read_records(tmp_path / "log", 10**6)
    assert (records.bodies, records.is_torn, records.error) == ([b"first", b"second"], False, "")


def test_an_oversized_log_is_refused(tmp_path):
    AppendLog(tmp_path / "file").append(bytes(100))
    with pytest.raises(SnapshotError, match="larger than the 50 bytes"):
        read_records(tmp_path / "file", 50)


def test_a_rotten_generation_file_costs_nothing_that_came_after_a_flush(tmp_path):
    database = Database(tmp_path).restart().restart()
    database.append("n", 1)
    database.log.flush("n")
    database.store.flush("n", database.log)
    (tmp_path / "generation").write_bytes(b"rotten")
    database = database.restart()
    database.append("n", 2)
    assert database.sync()
    assert database.restart().numbers("n") == [2]


def test_a_full_disk_costs_nothing_in_memory_and_is_made_good_later(tmp_path):
    """The kernel lets no file of the process grow beyond 300 bytes, then lets it again."""
    program = """
import resource, signal, sys
from pathlib import Path
from tests.databases.stored import Database

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
database = Database(Path(sys.argv[1]))
database.append("n", 1)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
database.append("n", *range(2, 60), length=60)
assert database.numbers("n") == list(range(1, 60))
assert not database.sync()
assert database.store.num_failures > 0
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
database.append("n", 60)
assert database.sync()
print("good")
"""
    process = run_program(program, str(tmp_path))
    assert process.communicate()[0] == "good\n"
    assert Database(tmp_path).numbers("n") == list(range(1, 61))


class SmallDisk:
    """Below ``root`` writing fails beyond ``num_bytes``, all files taken together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._root = root
        for module, name in ((append_log, "_write_all"), (snapshot, "write_file")):
            monkeypatch.setattr(module, name, self._bounded(getattr(module, name)))

    @property
    def num_used(self) -> int:
        return sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())

    def _bounded(self, write: Callable[[Any, bytes], None]) -> Callable[[Any, bytes], None]:
        def write_if_it_fits(target: Any, data: bytes) -> None:
            if self.num_used + len(data) > self.num_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(target, data)

        return write_if_it_fits


def test_a_full_disk_has_room_again_when_the_oldest_was_evicted(tmp_path, monkeypatch):
    database = Database(tmp_path, max_bytes=3000)
    disk = SmallDisk(monkeypatch, tmp_path, 10**6)
    database.append("n", *range(120))
    assert database.sync()
    disk.num_bytes = disk.num_used + 600
    database.append("n", *range(120, 300))
    database.sync()
    assert database.sync()
    database.append("n", 300)
    kept = database.numbers("n")
    assert database.restart().numbers("n") == kept


def test_what_does_not_fit_leaves_no_file(tmp_path, monkeypatch):
    database = Database(tmp_path)
    SmallDisk(monkeypatch, tmp_path, 0)
    database.append("n", *range(200))
    assert not database.sync()
    assert database.files("") == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_long_outage_leaves_hardly_more_files_than_none(tmp_path, monkeypatch, is_begun):
    """Though there are syncs that fail after every output, and whether files could be begun."""
    undisturbed = Database(tmp_path / "undisturbed")
    undisturbed.append("n", *range(50))
    assert undisturbed.sync()
    database = Database(tmp_path / "disturbed")
    with monkeypatch.context() as patch:
        SmallDisk(patch, database.store.directory, 0)
        if is_begun:
            patch.setattr(append_log, "_write_all", write_the_beginning)
        for number in range(50):
            database.append("n", number)
            assert not database.sync()
    assert database.sync()
    assert len(database.files("")) <= len(undisturbed.files("")) + 2
    again = database.restart()
    assert again.numbers("n") == list(range(50))
    assert not again.files(".refused")


def write_the_beginning(file: int, data: bytes) -> None:
    os.write(file, data[:3])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_that_began_on_a_full_disk_is_known_to_the_next(tmp_path, monkeypatch):
    """Its epoch, so that readers go on where they are; its text was in memory alone."""
    database = Database(tmp_path)
    database.append("n", 1)
    with monkeypatch.context() as patch:
        SmallDisk(patch, tmp_path, 0)
        full = database.restart()
        assert full.store.is_writable
        full.append("n", 2)
        assert not full.sync()
    again = full.restart()
    assert again.store.epochs == (database.store.epoch, full.store.epoch)
    assert again.store.first_version > full.store.first_version > database.store.first_version
    assert again.numbers("n") == [1]


def test_a_flush_needs_no_room_to_delete(tmp_path, monkeypatch):
    """Nothing comes back after a kill, though that it was flushed could not be written."""
    database = Database(tmp_path)
    database.append("n", *range(40))
    assert database.sync()
    SmallDisk(monkeypatch, tmp_path, 0)
    database.log.flush("n")
    with pytest.raises(DatabaseError, match="cannot be deleted"):
        database.store.flush("n", database.log)
    assert database.restart().numbers("n") == []


def test_a_kill_in_a_flush_leaves_nothing_that_was_set_aside(tmp_path, monkeypatch):
    def be_killed(*_: object) -> None:
        raise KeyboardInterrupt

    database = Database(tmp_path)
    database.append("n", 1)
    (log,) = database.files(".log")
    log.with_name("x.log.refused").write_bytes(b"text")
    database.log.flush("n")
    monkeypatch.setattr(snapshot, "write_file", be_killed)
    with pytest.raises(KeyboardInterrupt):
        database.store.flush("n", database.log)
    assert list(log.parent.iterdir()) == []
