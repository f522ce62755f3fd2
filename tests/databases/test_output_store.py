"""What was appended is there after a restart, whatever happened to the process or the files."""

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import output_log, snapshot
from hdserve.databases.append_log import AppendLog, read_records
from hdserve.databases.output_log import OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import Segment, concatenate
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, SnapshotError

KEY = DatabaseKey("a-model", "f" * 32)
ROOT = Path(__file__).parents[2]


class Database:
    """A log with its store, used as the actor uses them."""

    def __init__(self, directory: Path, key: DatabaseKey = KEY, max_bytes: int = 10**6) -> None:
        self.store = OutputStore(directory, key, lock_timeout_s=0.2)
        self.log = OutputLog(
            max_bytes, max_bytes, first_version=self.store.first_version, chunk_bytes=500
        )
        self.store.restore(self.log)

    def append(self, namespace: str, *numbers: int, length: int = 5) -> None:
        for number in numbers:
            segment = Segment.from_outputs("r", number, [np.full(length, number, np.uint32)])
            for appended in self.log.append(namespace, segment):
                self.store.append(namespace, appended)

    def sync(self) -> bool:
        return self.store.sync(self.log)

    def numbers(self, namespace: str) -> list[int]:
        segments = [segment for _, segment in self.log.partition(namespace).segments()]
        return concatenate(segments).sequence_numbers.tolist()

    def restart(self) -> "Database":
        """As after ``kill -9``: nothing more is written."""
        self.store.close()
        return Database(self.store.directory, self.store._key)

    def files(self, suffix: str) -> list[Path]:
        return sorted(self.store.directory.glob(f"*/*{suffix}"))


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
    assert len(database.store._namespaces) <= len(kept)
    assert sum(1 for name in kept if database.numbers(name)) == len(database.files(".log"))
    database.append("tenant-0", 1000)
    found = {name: database.numbers(name) for name in kept | {"tenant-0"}}
    database.sync()
    database = database.restart()
    assert {name: database.numbers(name) for name in found} == found
    assert database.log.partition("flushed").flushed_version


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
    database.log.set_calibration("other", "r", b"state")
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


def test_files_that_a_crash_in_a_flush_left_behind_are_not_read_again(tmp_path):
    database = Database(tmp_path)
    database.append("n", *range(40))
    database.sync()
    kept = {path: path.read_bytes() for path in database.files("")}
    database.log.flush("n")
    database.store.flush("n", database.log)
    for path, data in kept.items():
        path.write_bytes(data)
    database = database.restart()
    assert database.numbers("n") == []
    assert database.files(".chunk") == database.files(".log") == []


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
    database.log.set_calibration("n", "r", b"state")
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


@pytest.mark.parametrize("call", ["_set_aside", "sync"])
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
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(store, call, be_killed)
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


def test_a_successor_whose_numbers_are_taken_does_not_write(tmp_path):
    """The predecessor was restarted while it waited: its files are left alone."""
    first = Database(tmp_path)
    first.append("n", 1)
    second = Database(tmp_path)
    second.append("n", 2)
    first = first.restart()
    first.append("n", 3)
    first.store.close()
    assert not second.sync()
    assert sorted(Database(tmp_path).numbers("n")) == [1, 3]


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


class LogOfASlowReader(OutputLog):
    """A writer goes on while its files are read."""

    def __init__(self, writer: Database) -> None:
        super().__init__(10**6, 10**6)
        self._writer = writer

    def restore(self, namespace: str, first_version: int, segment: Segment) -> None:
        if not self.namespaces():
            self._writer.append("n", *range(60, 120))
            self._writer.sync()
        super().restore(namespace, first_version, segment)


def test_a_log_that_becomes_a_chunk_while_it_is_read_is_not_lost(tmp_path):
    writer = Database(tmp_path)
    writer.append("n", *range(60))
    writer.sync()
    (tail,) = writer.files(".log")
    log = LogOfASlowReader(writer)
    reader = OutputStore(tmp_path, KEY, is_read_only=True)
    reader.restore(log)
    assert not tail.exists()
    assert log.partition("n").num_outputs >= 60
    assert reader.num_refused == 0


def test_an_evicted_file_is_no_refused_one_to_a_reader(tmp_path):
    writer = Database(tmp_path, max_bytes=3000)
    writer.append("n", *range(60))
    writer.sync()
    reader = OutputStore(tmp_path, KEY, is_read_only=True)
    reader.restore(LogOfASlowReader(writer))
    assert reader.num_refused == 0


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="cannot be used"):
        OutputStore(tmp_path / "file" / "database", KEY)


def run_program(program: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_full_disk_costs_nothing_in_memory_and_is_made_good_later(tmp_path):
    """The kernel lets no file of the process grow beyond 300 bytes, then lets it again."""
    program = """
import resource, signal, sys
from pathlib import Path
from tests.databases.test_output_store import Database

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


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_while_snapshots_are_written_loses_nothing_acknowledged(tmp_path, seed):
    program = """
import sys
from pathlib import Path
from tests.databases.test_output_store import Database

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
    payload = snapshot.read_file(path, kind="chunk", fingerprint=KEY.fingerprint)
    assert payload["namespace"] == "n"
