"""What the actor answers, called as a plain object; ``test_mirror.py`` runs it in Ray."""

import errno
import math
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from actors import model_database_actor
from actors.model_database import METHODS_VERSION, actor_name
from actors.model_database_actor import ModelDatabaseActor
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import MAX_REPLY_BYTES, Poll, Position, Publish, Reply, Standing
from hdserve.databases.output_files import database_directory
from hdserve.databases.output_log import CHUNK_BYTES, MAX_CALIBRATION_BYTES, OutputLog
from hdserve.databases.segment import MAX_OUTPUT_TOKENS, Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, DatabaseInUse, SnapshotError
from tests.actors.impatient import impatient_store
from tests.actors.readers import KEY, Reader, many_namespaces, message, publish_to_all, restarted
from tests.databases.stored import no_room, unreadable

OTHER_MODEL = DatabaseKey("b-model", KEY.fingerprint)
OTHER_TOKENIZER = DatabaseKey("a-model", "0" * 32)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors hardly wait for files that another one keeps."""
    monkeypatch.setattr(model_database_actor, "OutputStore", impatient_store)


@pytest.mark.parametrize("interval_s", [1e300, math.inf])
def test_no_interval_is_too_long_for_snapshots(
    config: ModelDatabaseConfig, interval_s: float
) -> None:
    """What writes them waits, and does not end."""
    before = set(threading.enumerate())
    actor = ModelDatabaseActor(KEY, config.model_copy(update={"snapshot_interval_s": interval_s}))
    (thread,) = set(threading.enumerate()) - before
    thread.join(0.2)
    assert thread.is_alive()
    actor.close()


def test_what_cannot_be_read_is_tried_less_and_less_often(config, monkeypatch):
    """Each try reads what is there from its beginning.  Once it can be read, it is synced at the
    usual interval."""
    ModelDatabaseActor(KEY, config).close()
    pauses: list[float] = []
    with unreadable("generation"):
        actor = ModelDatabaseActor(KEY, config)
    actor._config = config.model_copy(update={"snapshot_interval_s": 10})

    here, real = threading.get_ident(), time.sleep

    def sleep(pause_s: float) -> None:
        if threading.get_ident() != here:
            real(pause_s)
            return
        pauses.append(pause_s)
        if len(pauses) == 7:
            raise SystemExit

    monkeypatch.setattr(time, "sleep", sleep)
    with unreadable("generation"), pytest.raises(SystemExit):
        actor._sync_forever()
    assert pauses == [10, 20, 40, 60, 60, 60, 60]
    del pauses[2:]
    with pytest.raises(SystemExit):
        actor._sync_forever()
    assert pauses[2:] == [10, 20, 10, 10, 10]
    actor.close()


def test_what_is_published_is_read_once(config):
    actor = ModelDatabaseActor(KEY, config)
    reader = Reader(actor, "r", "n")
    assert actor.publish(message(0, 3, 4)) == 2
    assert actor.publish(message(0, 3, 4)) == 0
    assert reader.read() == [0, 1]
    assert reader.read() == []
    assert Reader(actor, "w", "n").read() == []


def test_a_long_log_comes_in_replies_that_stay_inline(config):
    actor = ModelDatabaseActor(KEY, config)
    calibration = Publish("w", calibrations={"n": bytes(MAX_CALIBRATION_BYTES), "m": b"x" * 60000})
    actor.publish(calibration.encode(KEY))
    lengths = [MAX_OUTPUT_TOKENS, 1, 9000, MAX_OUTPUT_TOKENS, *[200] * 600]
    for first, length in enumerate(lengths):
        actor.publish(message(first, length))
        actor.publish(message(first, 10, namespace="m"))
    reader = Reader(actor, "r", "n", "m")
    assert sorted(reader.read()) == sorted(list(range(len(lengths))) * 2)


def test_a_reader_begins_with_what_is_newest(config):
    """As much as it wants of it, and without missing what comes since, or a flush."""
    actor = ModelDatabaseActor(KEY, config)
    for number in range(400):
        actor.publish(message(number, 1000))
    reader = Reader(actor, "r", "n", catch_up_bytes=300_000)
    found = reader.read()
    assert found == list(range(found[0], 400))
    assert 300_000 <= 4000 * len(found) < 300_000 + 2 * CHUNK_BYTES
    actor.publish(message(400, 3))
    assert reader.read() == [400]
    actor.flush("n")
    late = Reader(actor, "s", "n", catch_up_bytes=1)
    late.positions = {"n": Position(cursor=1)}
    assert late.poll().changes["n"].is_flushed


def test_an_unfinished_reader_is_asked_to_come_back_soon(config):
    actor = ModelDatabaseActor(KEY, config)
    for first in range(10):
        actor.publish(message(first, MAX_OUTPUT_TOKENS))
    reader = Reader(actor, "r", "n")
    reply = reader.poll()
    assert not reply.is_complete
    assert reply.next_poll_s < config.poll_interval_s
    reader.read()
    assert reader.poll().next_poll_s == config.poll_interval_s


def test_the_actor_slows_a_large_fleet_down(config):
    actor = ModelDatabaseActor(KEY, config)
    paces = [Reader(actor, f"r{number}", "n").poll().next_poll_s for number in range(1000)]
    assert paces[0] == config.poll_interval_s
    assert paces[-1] == pytest.approx(5.0)
    assert actor.info()["num_readers"] == 1000


def test_the_actor_slows_readers_of_many_namespaces_down(config):
    """Their polls take longer; one that follows fewer again is served as often as before."""
    actor = ModelDatabaseActor(KEY, config)
    names = many_namespaces(4000)
    readers = [Reader(actor, f"r{number}", *names) for number in range(20)]
    assert [reader.poll().next_poll_s for reader in readers][-1] == pytest.approx(4.1)
    for reader in readers:
        reader.positions = {"n": reader.positions[names[0]]}
        pace_s = reader.poll().next_poll_s
    assert pace_s == config.poll_interval_s


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (message(0, 3, key=OTHER_TOKENIZER), "another tokenizer"),
        (message(0, 3, key=OTHER_MODEL), "of the model 'b-model'"),
        (message(0, 3)[:-1], "truncated or corrupt"),
        (b"", "truncated or corrupt"),
        (Poll("r").encode(KEY), "this is a 'poll', not a 'publish'"),
    ],
)
def test_a_foreign_message_is_refused(config, data, reason):
    actor = ModelDatabaseActor(KEY, config)
    with pytest.raises(SnapshotError, match=reason):
        actor.publish(data)
    assert actor.info()["num_bytes"] == 0


def test_a_foreign_poll_is_refused(config):
    actor = ModelDatabaseActor(KEY, config)
    with pytest.raises(SnapshotError, match="another tokenizer"):
        actor.changes_since(Poll("r").encode(OTHER_TOKENIZER))


def test_a_reader_goes_on_where_it_was_after_a_restart(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4))
    reader = Reader(actor, "r", "n")
    assert reader.read() == [0, 1]
    reader.actor = restarted(actor, config)
    reader.actor.publish(message(2, 5))
    reply = reader.poll()
    assert reply.changes["n"].segment.sequence_numbers.tolist() == [2]
    assert (reply.is_reset, reply.refill) == (False, {})
    reader.actor = restarted(reader.actor, config)
    reader.actor.publish(message(3, 5))
    assert reader.read() == [3]


def test_export_goes_into_the_database_of_another_model_of_the_tokenizer(config):
    actor = ModelDatabaseActor(KEY, config)
    for first in range(200):
        actor.publish(message(first, MAX_OUTPUT_TOKENS))
    other = ModelDatabaseActor(OTHER_MODEL, ModelDatabaseConfig())
    cursor, num_new, is_last, num_messages = 0, 0, False, 0
    while not is_last:
        data, cursor, is_last, _ = actor.export("n", cursor)
        num_new += other.import_(data)
        num_messages += 1
    assert (num_new, num_messages > 1) == (200, True)
    assert other.info()["namespaces"]["n"]["num_outputs"] == 200
    assert other.import_(actor.export("unknown")[0]) == 0
    foreign = ModelDatabaseActor(OTHER_TOKENIZER, ModelDatabaseConfig())
    with pytest.raises(SnapshotError, match="another tokenizer"):
        foreign.import_(data)


def test_what_was_flushed_comes_back_by_an_import_and_reaches_every_replica(config):
    """The one that generated it too, though all of them were told to forget it."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4, sender="r"))
    actor.publish(Publish("r", calibrations={"n": b"state"}).encode(KEY))
    origin, kept = Reader(actor, "r", "n"), OutputLog(10**6, 10**6)
    kept.append("n", Segment.from_outputs("r", 0, [np.zeros(3, np.uint32), np.ones(4, np.uint32)]))
    origin.read()
    archive, _, is_last, _ = actor.export("n")
    assert is_last
    actor.flush("n")
    assert origin.poll().changes["n"].is_flushed
    kept.flush("n")
    assert [actor.import_(archive) for _ in range(2)] == [2, 0]
    change = origin.poll().changes["n"]
    assert change.calibration == b"state"
    (appended,) = kept.append("n", change.segment)
    assert [output.tolist() for output in appended.segment.outputs()] == [[0] * 3, [1] * 4]


def test_info_tells_what_is_inside(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(7, 3))
    info = actor.info()
    assert info["model"] == KEY.model
    assert info["namespaces"]["n"]["num_outputs"] == 1
    assert info["is_writable"]
    assert actor.snapshot_now()


def test_readers_are_told_what_is_in_memory_only(config):
    """Not where nothing is to be written."""
    lock = database_directory(config.snapshot_dir, KEY) / "lock"
    lock.mkdir(parents=True)
    actor = ModelDatabaseActor(KEY, config)
    assert Reader(actor, "r").poll().is_unwritten
    assert not actor.snapshot_now()
    assert Reader(actor, "r").poll().is_unwritten
    lock.rmdir()
    assert actor.snapshot_now()
    assert not Reader(actor, "r").poll().is_unwritten
    in_memory = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    assert not Reader(in_memory, "r").poll().is_unwritten
    assert not in_memory.snapshot_now()
    assert not Reader(in_memory, "r").poll().is_unwritten


def test_one_that_cannot_write_everything_is_not_closed(config):
    """It says why, and goes on; so does one that was closed and is not ended."""
    lock = database_directory(config.snapshot_dir, KEY) / "lock"
    lock.mkdir(parents=True)
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3))
    assert f"{lock.parent} cannot be written" in str(actor.close())
    lock.rmdir()
    assert actor.close() is None
    actor.publish(message(1, 3))
    assert actor.info()["is_unwritten"]
    assert actor.close() is None
    assert not actor.info()["is_unwritten"]
    assert Reader(ModelDatabaseActor(KEY, config), "r", "n").read() == [0, 1]
    assert ModelDatabaseActor(KEY, ModelDatabaseConfig()).close() is None


def test_one_that_was_closed_and_goes_on_flushes_nothing_again(config):
    """What came behind the flush is there, in memory and on the disk."""
    actor = ModelDatabaseActor(KEY, config)
    reader = Reader(actor, "r", "n")
    actor.publish(message(0, 3))
    actor.flush("n")
    actor.publish(message(1, 3))
    assert actor.close() is None
    actor.publish(message(2, 3))
    assert actor.close() is None
    assert actor.close() is None
    assert reader.read() == [1, 2]
    assert Reader(ModelDatabaseActor(KEY, config), "r", "n").read() == [1, 2]


def disk_that_stands_still(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Events: somebody waits for the disk; it goes on."""
    is_waiting, goes_on = threading.Event(), threading.Event()
    sync_file = os.fsync

    def wait(descriptor: int) -> None:
        is_waiting.set()
        assert goes_on.wait(30)
        sync_file(descriptor)

    monkeypatch.setattr(os, "fsync", wait)
    return is_waiting, goes_on


def test_nobody_waits_for_the_disk_of_a_snapshot(config, monkeypatch):
    """The disk stands still until the outputs that come meanwhile are taken."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3))
    is_waiting, goes_on = disk_that_stands_still(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        snapshot = threads.submit(actor.snapshot_now)
        try:
            assert is_waiting.wait(30)
            assert threads.submit(actor.publish, message(1, 3)).result(10) == 1
            assert not snapshot.done()
        finally:
            goes_on.set()
        assert snapshot.result(30)
    assert actor.snapshot_now()
    assert Reader(restarted(actor, config), "r", "n").read() == [0, 1]


def test_a_flush_waits_for_a_snapshot_and_is_not_undone_by_it(config, monkeypatch):
    """The chunk that is being written when the flush comes is gone afterwards."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, *[MAX_OUTPUT_TOKENS] * 10))
    is_waiting, goes_on = disk_that_stands_still(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        snapshot = threads.submit(actor.snapshot_now)
        try:
            assert is_waiting.wait(30)
            flush = threads.submit(actor.flush, "n")
            with pytest.raises(TimeoutError):
                flush.result(0.2)
        finally:
            goes_on.set()
        assert snapshot.result(30)
        flush.result(30)
    assert [path.name for path in config.snapshot_dir.rglob("*/*/*/*")] == ["state"]
    assert Reader(restarted(actor, config), "r", "n").read() == []


def test_a_flush_does_not_wait_for_a_disk_that_stands_still(config, monkeypatch):
    """It is forgotten in memory at once, and the next snapshot deletes its files."""
    monkeypatch.setattr(model_database_actor, "_MAX_DISK_WAIT_S", 0.0)
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, *[MAX_OUTPUT_TOKENS] * 10))
    is_waiting, goes_on = disk_that_stands_still(monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        snapshot = threads.submit(actor.snapshot_now)
        try:
            assert is_waiting.wait(30)
            with pytest.raises(DatabaseError, match="forgotten in memory, but the disk is slow"):
                actor.flush("n")
            assert Reader(actor, "r", "n").read() == []
            assert not snapshot.done()
        finally:
            goes_on.set()
        assert snapshot.result(30)
    assert actor.snapshot_now()
    assert [path.name for path in config.snapshot_dir.rglob("*/*/*/*")] == ["state"]
    assert Reader(restarted(actor, config), "r", "n").read() == []


def test_without_a_directory_nothing_is_kept():
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    actor.publish(message(0, 3))
    assert not actor.snapshot_now()
    actor.flush("n")
    actor.close()
    assert actor.info()["directory"] is None


def test_a_directory_that_cannot_be_used_costs_only_the_snapshots(tmp_path, caplog):
    """And those only until it can be."""
    (tmp_path / "file").write_text("")
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig(snapshot_dir=tmp_path / "file"))
    assert "cannot be written, going on in memory" in caplog.text
    assert actor.publish(message(0, 3)) == 1
    assert not actor.snapshot_now()
    (tmp_path / "file").unlink()
    assert actor.snapshot_now()
    assert not Reader(actor, "r").poll().is_unwritten


def test_what_the_disk_has_no_room_for_is_told_at_once(config):
    """Not with the next snapshot alone."""
    actor = ModelDatabaseActor(KEY, config)
    assert not actor.info()["is_unwritten"]
    with no_room():
        actor.publish(message(0, 3))
    assert actor.info()["is_unwritten"]
    assert Reader(actor, "r").poll().is_unwritten
    assert actor.snapshot_now()
    assert not actor.info()["is_unwritten"]


@pytest.mark.parametrize("name", ["state", "generation"])
def test_a_disk_that_cannot_be_read_at_the_start_is_taken_when_it_can(config, caplog, name):
    """What came meanwhile comes after what is there, and readers are told of all of it."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4))
    actor.publish(message(0, 3, namespace="flushed"))
    actor.publish(Publish("w", calibrations={"n": b"state"}).encode(KEY))
    actor.close()
    with unreadable(name):
        actor = ModelDatabaseActor(KEY, config)
        actor.publish(message(1, 4, 5))
        reader = Reader(actor, "r", "n")
        assert reader.read() == [1, 2]
        with pytest.raises(DatabaseError, match="Too many open files"):
            actor.flush("flushed")
        with pytest.raises(DatabaseError, match="Too many open files"):
            actor.export("n")
        assert not actor.snapshot_now()
        assert reader.poll().is_unwritten
    assert caplog.text.count("nothing is kept on disk") == 1
    assert actor.snapshot_now()
    assert reader.poll().is_reset
    assert Reader(actor, "s", "n", "flushed").read() == [0, 1, 2]
    actor = restarted(actor, config)
    changes = Reader(actor, "r", "n", "flushed").poll().changes
    assert changes["n"].segment.sequence_numbers.tolist() == [0, 1, 2]
    assert changes["n"].calibration == b"state"
    assert len(changes["flushed"].segment) == 0


@pytest.mark.usefixtures("impatient")
def test_what_one_cluster_forgets_is_forgotten_by_another_that_waits(config):
    """In its replicas, too, with its next snapshot."""
    first = ModelDatabaseActor(KEY, config)
    for namespace in ("n", "m"):
        first.publish(message(0, 3, namespace=namespace))
    second = ModelDatabaseActor(KEY, config)
    second.publish(message(1, 3))
    reader = Reader(second, "r", "n", "m")
    assert len(reader.read()) == 3
    first.flush("n")
    assert not second.snapshot_now()
    changes = reader.poll().changes
    assert changes["n"].is_flushed
    assert "m" not in changes
    second.publish(message(2, 3))
    assert (reader.read(), Reader(second, "s", "n").read()) == ([2], [2])
    first.close()
    assert second.snapshot_now()
    assert Reader(restarted(second, config), "r", "n", "m").read() in ([0, 2], [2, 0])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("ends_at_once", [False, True])
def test_the_last_of_three_in_a_row_keeps_what_all_have_taken(config, ends_at_once):
    """As the clusters of two upgrades that overlap; what one of them forgot does not come back."""
    first = ModelDatabaseActor(KEY, config)
    first.publish(message(0, 3))
    with ThreadPoolExecutor(2) as threads:
        second, third = threads.map(lambda _: ModelDatabaseActor(KEY, config), range(2))
    reader = Reader(third, "r", "n")
    for number, actor in enumerate([second, third], start=1):
        for namespace in ("n", "of-second", "of-third"):
            actor.publish(message(number, 3, namespace=namespace))
    third.publish(Publish("w", calibrations={"n": b"state"}).encode(KEY))
    with pytest.raises(DatabaseInUse):
        third.flush("of-third")
    third.publish(message(3, 3, namespace="of-third"))
    assert reader.read() == [0, 2]
    third.publish(message(6, 3, namespace="of-first"))
    first.flush("of-first")
    assert not third.snapshot_now()
    first.close()
    assert second.snapshot_now()
    second.flush("of-second")
    for namespace in ("of-first", "of-second"):
        second.publish(message(4, 3, namespace=namespace))
    assert not third.snapshot_now()
    third.publish(message(7, 3, namespace="of-first"))
    second.close()
    if ends_at_once:
        third.close()
    else:
        assert third.snapshot_now()
        assert reader.poll().is_reset
        assert not reader.poll().is_unwritten
        third.publish(message(5, 3))
    last = restarted(third, config)
    changes = Reader(last, "s", "n", "of-first", "of-second", "of-third").poll().changes
    found = {name: change.segment.sequence_numbers.tolist() for name, change in changes.items()}
    later = [] if ends_at_once else [5]
    forgotten = {"of-first": [4, 7], "of-second": [4], "of-third": [3]}
    assert found == {"n": [0, 1, 2, *later], **forgotten}
    assert changes["n"].calibration == b"state"


def test_a_directory_that_cannot_be_listed_at_the_start_is_taken_when_it_can(config, monkeypatch):
    scan = os.scandir

    def fail(path: str) -> None:
        if str(config.snapshot_dir) in str(path):
            raise OSError(errno.ESTALE, "Stale file handle")
        return scan(path)

    ModelDatabaseActor(KEY, config).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        actor = ModelDatabaseActor(KEY, config)
        assert not actor.snapshot_now()
    assert actor.snapshot_now()
    assert actor.info()["is_writable"]


def test_a_database_of_another_version_is_left_alone_and_named(config, caplog):
    """At every start, for as long as it is there."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3))
    actor.close()
    other = config.snapshot_dir / "v0"
    (config.snapshot_dir / "v1").rename(other)
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    for num_named in (1, 2):
        actor = ModelDatabaseActor(KEY, config)
        assert actor.info()["num_bytes"] == 0
        actor.close()
        assert caplog.text.count(f"{other}/a-model-") == num_named
        assert "export it with the hdserve that wrote it" in caplog.text
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


def merge_usable(kept: bytes, new: bytes) -> bytes:
    """Calibration is usable if it begins with a v."""
    if not kept.startswith(b"v") or not new.startswith(b"v"):
        raise ValueError("of another form")
    return max(kept, new)


def test_calibration_that_cannot_be_used_fails_nothing_else(config):
    """The message is acknowledged: its outputs and its other calibration are kept."""
    actor = ModelDatabaseActor(KEY, config, merge_usable)
    actor.publish(Publish("w", calibrations={"n": b"v1", "m": b"v1"}).encode(KEY))
    segment = Segment.from_outputs("w", 0, [np.ones(3, np.uint32)])
    calibrations = {"n": b"junk", "large": bytes(MAX_CALIBRATION_BYTES + 1), "m": b"v2"}
    assert actor.publish(Publish("w", {"n": segment}, calibrations).encode(KEY)) == 1
    changes = Reader(actor, "r", "n", "m").poll().changes
    assert (changes["n"].calibration, changes["m"].calibration) == (b"v1", b"v2")
    assert len(changes["n"].segment) == 1
    assert actor.info()["num_refused_calibrations"] == 2


def test_calibration_of_a_message_that_is_sent_again_counts_once(config):
    actor = ModelDatabaseActor(KEY, config, lambda kept, new: kept + new)
    for sender, calibration in (("a", b"1"), ("b", b"1"), ("b", b"1"), ("b", b"2"), ("a", b"1")):
        actor.publish(Publish(sender, calibrations={"n": calibration}).encode(KEY))
    (change,) = Reader(actor, "r", "n").poll().changes.values()
    assert change.calibration == b"112"


def test_kept_calibration_of_another_form_gives_way(config):
    """What an older version left behind does not keep newer replicas from sharing theirs."""
    actor = ModelDatabaseActor(KEY, config, merge_usable)
    for calibration in (b"older", b"v2", b"v1"):
        actor.publish(Publish("w", calibrations={"n": calibration}).encode(KEY))
    assert Reader(actor, "r", "n").poll().changes["n"].calibration == b"v2"
    assert actor.info()["num_refused_calibrations"] == 0


def test_what_was_learned_before_a_flush_does_not_come_back(config):
    """Of a replica that has not heard of it, in this run or one the actor does not know; what is
    learned afterwards is kept."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4))
    reader = Reader(actor, "r", "n")
    reader.read()

    def publish(calibration: bytes, standing: Standing) -> bytes | None:
        sent = Publish("r", calibrations={"n": calibration}, standings={"n": standing})
        actor.publish(sent.encode(KEY))
        return Reader(actor, "s", "n").poll().changes["n"].calibration

    old = Standing(reader.epoch, reader.positions["n"].cursor)
    assert publish(b"before", old) == b"before"
    actor.flush("n")
    for standing in (old, Standing(), Standing("another run", 2**40)):
        assert publish(b"late", standing) is None
    reader.read()
    new = Standing(reader.epoch, reader.positions["n"].cursor)
    assert publish(b"after", new) == b"after"
    actor.snapshot_now()
    reader.actor = actor = restarted(actor, config)
    assert publish(b"late", old) == b"after"
    assert publish(b"later", new) == b"later"


def test_calibration_survives_a_restart(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(Publish("w", calibrations={"n": b"state"}).encode(KEY))
    actor.close()
    actor = ModelDatabaseActor(KEY, config)
    assert Reader(actor, "r", "n").poll().changes["n"].calibration == b"state"


def test_names_tell_databases_and_wire_versions_apart():
    names = {actor_name(key) for key in (KEY, OTHER_MODEL, OTHER_TOKENIZER)}
    assert len(names) == 3
    assert all(f"-v1.{METHODS_VERSION}:" in name for name in names)


def test_a_reply_stays_inline_when_every_output_has_another_origin_and_namespace(config):
    actor = ModelDatabaseActor(KEY, config)
    names = [f"namespace-{number:03}" for number in range(100)]
    for number, name in enumerate(names):
        for replica in range(10):
            sender = f"a-replica-with-a-long-name-{number}-{replica}"
            actor.publish(message(0, 30, namespace=name, sender=sender))
            actor.publish(message(0, 30, namespace="n", sender=sender))
    assert len(Reader(actor, "r", *names, "n").read()) == 2000


def test_replies_stay_inline_and_full_however_many_namespaces_wait(config):
    """That one waits is said once, for what was not reached costs room that outputs need."""
    names = many_namespaces(3000)
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    publish_to_all(actor, names)
    reader = Reader(actor, "r", *names)
    num_polls = num_read = 0
    while num_read < len(names):
        reply = reader.poll()
        num_polls += 1
        num_read += sum(len(change.segment) for change in reply.changes.values())
        assert sum(not change.is_complete for change in reply.changes.values()) <= 1
        assert reply.is_complete == (num_read == len(names))
    assert num_polls <= len(names) * 700 // MAX_REPLY_BYTES + 1


def test_every_namespace_is_served_beside_one_that_never_ends():
    """A reader names them in another order each time."""
    names = many_namespaces(1000)
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    publish_to_all(actor, names)
    reader, order, found = Reader(actor, "r", *names, "n"), random.Random(0), set()
    for number in range(200):
        actor.publish(message(2 * number, MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS))
        shuffled = order.sample(list(reader.positions), len(reader.positions))
        reader.positions = {name: reader.positions[name] for name in shuffled}
        found |= reader.poll().changes.keys()
    assert found == {*names, "n"}
    assert all(reader.positions[name].num_held == 1 for name in names)


def test_many_flushes_come_before_what_is_new():
    names = many_namespaces(256)
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    for name in names:
        actor.flush(name)
    actor.publish(message(0, MAX_OUTPUT_TOKENS))
    poll = Poll("r", "", {"n": Position(1)}, idle=dict.fromkeys(names, 1))
    data = actor.changes_since(poll.encode(KEY))
    assert len(data) <= MAX_REPLY_BYTES
    reply = Reply.decode(data, KEY)
    assert all(reply.changes[name].is_flushed for name in names)
    assert len(reply.changes["n"].segment) == reply.changes["n"].is_complete
