"""A model database is carried from one cluster to another in one file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hdserve.cli.commands import app
from hdserve.databases import archive as archives
from hdserve.databases import stored
from hdserve.databases.append_log import AppendLog, take_record
from hdserve.databases.corpus import corpus_files
from hdserve.databases.database_files import DatabaseFiles
from hdserve.databases.messages import Publish
from hdserve.databases.output_files import database_directory
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES, OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import FORMAT_VERSION, MAX_MESSAGE_BYTES, DatabaseKey
from hdserve.errors import DatabaseError, SnapshotError
from tests.closed import closed
from tests.databases.stored import without_locks

KEY = DatabaseKey("a-model", "f" * 32)


def fill(
    root: Path,
    key: DatabaseKey = KEY,
    num_outputs: int = 30,
    first_token: int = 0,
    origins: tuple[str, str] = ("r1", "r2"),
) -> OutputStore:
    """Write a database of two namespaces; returns its store, which is still open."""
    store = OutputStore(database_directory(root, key), key)
    log = OutputLog(10**9, 10**9, first_version=store.first_version, chunk_bytes=500)
    for namespace, origin in zip(("default", "tenant"), origins, strict=True):
        outputs = [np.full(7, first_token + number, np.uint32) for number in range(num_outputs)]
        for appended in log.append(namespace, Segment.from_outputs(origin, 0, outputs)):
            store.append(namespace, appended)
    log.set_calibration("default", b"learned")
    store.state_changed("default")
    assert store.sync(log)
    return store


def kept(root: Path, key: DatabaseKey = KEY) -> OutputLog:
    log = OutputLog(10**9, 10**9)
    DatabaseFiles(database_directory(root, key), key).restore(log)
    return log


def contents(root: Path, key: DatabaseKey = KEY) -> dict[str, list[list[int]]]:
    log = kept(root, key)
    return {
        name: [
            output.tolist()
            for _, segment in log.partition(name).segments()
            for output in segment.outputs()
        ]
        for name in log.namespaces()
    }


def test_export_and_import_carry_everything(tmp_path: Path) -> None:
    """Outputs of all namespaces and calibration; a second import adds nothing."""
    fill(tmp_path / "old").close()
    archive, new = tmp_path / "a.archive", tmp_path / "new"
    assert archives.export_database(tmp_path / "old", KEY, archive).num_outputs == 60
    assert archives.read_archive_key(archive) == KEY
    assert archives.import_archive(archive, new, KEY) == 60
    assert contents(new) == contents(tmp_path / "old")
    assert stored.describe(new, KEY).namespaces == (
        stored.NamespaceInfo("default", 30, 210, has_calibration=True),
        stored.NamespaceInfo("tenant", 30, 210, has_calibration=False),
    )
    assert archives.import_archive(archive, new, KEY) == 0
    assert contents(new) == contents(tmp_path / "old")


@pytest.mark.parametrize("is_open", [False, True])
def test_all_messages_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """Where a namespace takes several, with a calibration and without one."""
    monkeypatch.setattr(archives, "MESSAGE_BYTES", 300)
    store = fill(tmp_path / "old")
    if not is_open:
        store.close()
    archive = tmp_path / "a.archive"
    assert archives.export_database(tmp_path / "old", KEY, archive).num_outputs == 60
    assert archives.import_archive(archive, tmp_path / "new", KEY) == 60
    assert contents(tmp_path / "new") == contents(tmp_path / "old")
    store.close()


def test_a_volume_without_locks_takes_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an export that was killed there; no lock stays behind."""
    fill(tmp_path / "old").close()
    archive = tmp_path / "a.archive"
    (tmp_path / "a.archive.lock").touch()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert archives.export_database(tmp_path / "old", KEY, archive).num_outputs == 60
    assert [path.name for path in tmp_path.glob("a.archive*")] == ["a.archive"]


def test_two_exports_do_not_write_one_archive(tmp_path: Path) -> None:
    """The second is refused, and the first complete."""
    store = fill(tmp_path / "old")
    archive = tmp_path / "a.archive"
    refused = []

    def export_again(_num: int, _total: int) -> None:
        with pytest.raises(DatabaseError, match="being written by another export"):
            archives.export_database(tmp_path / "old", KEY, archive)
        refused.append(1)

    assert archives.export_database(tmp_path / "old", KEY, archive, export_again).num_outputs == 60
    assert refused
    assert [path.name for path in tmp_path.glob("a.archive*")] == ["a.archive"]
    assert archives.import_archive(archive, tmp_path / "new", KEY) == 60
    store.close()


def interrupted_export(root: Path, archive: Path, num_messages: int) -> None:
    """What Ctrl-C does after so many messages."""
    calls = iter(range(num_messages))

    def interrupt(_num: int, _total: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        archives.export_database(root, KEY, archive, interrupt)


def test_an_interrupted_export_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is left, and nothing bears the name of the archive before it is complete."""
    monkeypatch.setattr(archives, "MESSAGE_BYTES", 300)
    root, archive = tmp_path / "old", tmp_path / "a.archive"
    fill(root).close()
    archives.export_database(root, KEY, tmp_path / "whole")
    interrupted_export(root, archive, 5)
    unfinished = tmp_path / "a.archive.unfinished"
    assert unfinished.stat().st_size > 0
    assert not archive.exists()
    seen: list[tuple[int, int]] = []
    exported = archives.export_database(root, KEY, archive, lambda *told: seen.append(told))
    assert exported == archives.Exported(60, 0)
    assert seen[0] == (0, 60)
    assert sum(num for num, _ in seen) == 60
    assert archive.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not unfinished.exists()


def test_an_archive_may_be_larger_than_4_gib(tmp_path: Path) -> None:
    """Its size alone is no reason to refuse it."""
    archive = tmp_path / "a.archive"
    AppendLog(archive).append(archives.encode_end(KEY))
    os.truncate(archive, 2**33)
    assert archives.read_archive_key(archive) == KEY


def record_ends(data: bytes) -> list[int]:
    """Where each record of an archive ends."""
    ends, position = [], 0
    while (taken := take_record(data, position)) is not None:
        _, position = taken
        ends.append(position)
    return ends


def test_an_archive_that_is_cut_between_two_records_is_refused(tmp_path: Path) -> None:
    """Wherever that is, and nothing of it is taken."""
    fill(tmp_path / "old").close()
    archive = tmp_path / "a.archive"
    archives.export_database(tmp_path / "old", KEY, archive)
    data = archive.read_bytes()
    *ends, last = record_ends(data)
    assert last == len(data)
    assert len(ends) > 3
    for end in ends:
        archive.write_bytes(data[:end])
        with pytest.raises(SnapshotError, match="ends before its last record"):
            archives.import_archive(archive, tmp_path / "new", KEY)
    assert not (tmp_path / "new").exists()


def test_an_import_makes_no_more_namespaces_than_there_is_room_for() -> None:
    """Each takes memory and a file, beside its outputs; what is there already grows."""
    log = OutputLog(10**6, 10**6)
    one = Segment.from_outputs("r", 0, [np.full(1, 7, np.uint32)])
    many = Publish("archive-part", {f"n{number}": one for number in range(2**13)})
    assert archives.take_message(many, log, None) == 2**13
    with pytest.raises(SnapshotError, match="too many namespaces"):
        archives.take_message(Publish("archive-part", {"other": one}), log, None)
    assert "other" not in log.namespaces()
    assert archives.take_message(many, log, None) == 0
    for number in range(10):
        log.flush(f"n{number}")
        log.flush(f"flushed-{number}")
    assert archives.take_message(Publish("archive-part", {"other": one}), log, None) == 1
    assert log.has_room(f"flushed-{number}" for number in range(9))
    assert not log.has_room(f"flushed-{number}" for number in range(10))
    assert OutputLog(10**6, 2**30).has_room(f"{number}" for number in range(2**15))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_bytes": 2 * 30 * 42 - 1}, "namespace (default|tenant) would have 2,520 bytes"),
        ({"max_total_bytes": 4 * 30 * 42 - 1}, "all namespaces would have 5,040 bytes"),
    ],
)
def test_an_import_that_a_server_would_not_keep_is_refused(
    tmp_path: Path, limits: dict[str, int], reason: str
) -> None:
    """Before anything is added; what is there already does not count twice."""
    fill(tmp_path / "old").close()
    fill(tmp_path / "new", first_token=100, origins=("r3", "r4")).close()
    archive, before = tmp_path / "a.archive", contents(tmp_path / "new")
    archives.export_database(tmp_path / "old", KEY, archive)
    with pytest.raises(DatabaseError, match=reason):
        archives.import_archive(archive, tmp_path / "new", KEY, **limits)
    assert contents(tmp_path / "new") == before
    (name, most), *_ = limits.items()
    for num_new in (60, 0):
        imported = archives.import_archive(archive, tmp_path / "new", KEY, **{name: most + 1})
        assert imported == num_new


def test_an_import_makes_no_more_namespaces_than_a_server_would(tmp_path: Path) -> None:
    one = Segment.from_outputs("r", 0, [np.full(1, 7, np.uint32)])
    archive = AppendLog(tmp_path / "a.archive")
    many = Publish("archive-part", {f"n{number}": one for number in range(2**13 + 1)})
    for body in (many.encode(KEY), archives.encode_end(KEY)):
        archive.append(body)
    with pytest.raises(DatabaseError, match="too many namespaces"):
        archives.import_archive(archive.path, tmp_path, KEY, max_total_bytes=2**20)
    assert contents(tmp_path) == {}


def test_the_archive_of_an_empty_database_says_whose_it_is(tmp_path: Path) -> None:
    OutputStore(database_directory(tmp_path / "old", KEY), KEY).close()
    archive = tmp_path / "a.archive"
    assert archives.export_database(tmp_path / "old", KEY, archive).num_outputs == 0
    assert archives.read_archive_key(archive) == KEY
    assert archives.import_archive(archive, tmp_path / "new", KEY) == 0


def test_what_is_imported_is_numbered_above_all_that_was(tmp_path: Path) -> None:
    """So that readers of a namespace that is no longer there get it, too."""
    fill(tmp_path / "old").close()
    archives.export_database(tmp_path / "old", KEY, tmp_path / "a.archive")
    before = OutputStore(database_directory(tmp_path / "new", KEY), KEY)
    before.close()
    archives.import_archive(tmp_path / "a.archive", tmp_path / "new", KEY)
    assert kept(tmp_path / "new").partition("default").first_version > before.first_version


def test_an_import_has_one_message_of_the_archive_in_memory(tmp_path: Path) -> None:
    """What is there already costs no memory, however large the archive is."""
    fill(tmp_path / "old").close()
    archive = AppendLog(tmp_path / "a.archive")
    outputs = [np.full(2**14, 1, np.uint32)] * 60
    message = Publish("archive", {"default": Segment.from_outputs("r1", 0, outputs)}).encode(KEY)
    for _ in range(20):
        archive.append(message)
    archive.append(archives.encode_end(KEY))
    archives.import_archive(archive.path, tmp_path / "new", KEY)
    tracemalloc.start()
    try:
        assert archives.import_archive(archive.path, tmp_path / "new", KEY) == 0
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < archive.path.stat().st_size / 2


def test_what_was_flushed_can_be_imported_again_and_counts_once(tmp_path: Path) -> None:
    """Beside what came after the flush, which is there already."""
    store = fill(tmp_path)
    log = OutputLog(10**9, 10**9, first_version=store.first_version)
    store.restore(log)
    archives.export_database(tmp_path, KEY, tmp_path / "before")
    log.flush("tenant")
    store.flush("tenant", log)
    for appended in log.append("tenant", Segment.from_outputs("r2", 30, [np.ones(7, np.uint32)])):
        store.append("tenant", appended)
    store.sync(log)
    store.close()
    archives.export_database(tmp_path, KEY, tmp_path / "after")
    imported = [
        archives.import_archive(tmp_path / name, tmp_path, KEY)
        for name in ("before", "before", "after")
    ]
    assert imported == [30, 0, 0]
    assert len(contents(tmp_path)["tenant"]) == 31


def test_an_archive_of_many_calibrations_can_be_imported(tmp_path: Path) -> None:
    """Together they are larger than a message may be."""
    store = OutputStore(database_directory(tmp_path, KEY), KEY)
    log = OutputLog(10**9, 10**9, first_version=store.first_version)
    calibration = bytes(MAX_CALIBRATION_BYTES)
    namespaces = [f"tenant-{number}" for number in range(MAX_MESSAGE_BYTES // len(calibration) + 1)]
    for namespace in namespaces:
        log.set_calibration(namespace, calibration)
        store.state_changed(namespace)
    assert store.sync(log)
    store.close()
    archives.export_database(tmp_path, KEY, tmp_path / "a.archive")
    archives.import_archive(tmp_path / "a.archive", tmp_path / "new", KEY)
    found = stored.describe(tmp_path / "new", KEY).namespaces
    assert [item.name for item in found] == sorted(namespaces)
    assert all(item.has_calibration for item in found)


@pytest.mark.parametrize("name", ["", "a" * 65, "a b"])
def test_a_namespace_that_no_key_could_have_is_refused_before_anything_is_added(
    tmp_path: Path, name: str
) -> None:
    """Also where it comes last, and with calibration alone."""
    outputs = Segment.from_outputs("r", 0, [np.full(7, 1, np.uint32)])
    archive = AppendLog(tmp_path / "a.archive")
    for message in (
        Publish("archive", {"tenant": outputs}),
        Publish("archive", {}, {name: b"learned"}),
    ):
        archive.append(message.encode(KEY))
    with pytest.raises(SnapshotError, match="it has a namespace"):
        archives.import_archive(archive.path, tmp_path, KEY)
    assert not database_directory(tmp_path, KEY).exists()


def test_a_calibration_that_is_too_large_is_refused_before_anything_is_added(
    tmp_path: Path,
) -> None:
    """In an archive, where it may come behind outputs, and in a message of one."""
    outputs = Segment.from_outputs("r", 0, [np.full(7, 1, np.uint32)])
    too_large = {"tenant": bytes(MAX_CALIBRATION_BYTES + 1)}
    messages = Publish("archive", {"tenant": outputs}), Publish("archive", calibrations=too_large)
    archive = AppendLog(tmp_path / "a.archive")
    for message in messages:
        archive.append(message.encode(KEY))
    with pytest.raises(DatabaseError, match="calibration of"):
        archives.import_archive(archive.path, tmp_path, KEY)
    assert not database_directory(tmp_path, KEY).exists()
    log = OutputLog(10**9, 10**9)
    with pytest.raises(DatabaseError, match="calibration of"):
        archives.take_message(Publish("archive", {"tenant": outputs}, too_large), log, None)
    assert log.num_bytes == 0


def test_reading_changes_nothing_on_disk(tmp_path: Path) -> None:
    """A database in use is described and exported as it is, and not written to."""
    store = fill(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert stored.describe(tmp_path, KEY).num_outputs == 60
    assert archives.export_database(tmp_path, KEY, tmp_path / "copy").num_outputs == 60
    (tmp_path / "copy").unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    store.close()


def test_import_into_a_database_in_use_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the error alone: nothing is kept in memory until the database is free."""
    store = fill(tmp_path)
    archives.export_database(tmp_path, KEY, tmp_path / "copy")
    with pytest.raises(DatabaseError, match="in use"):
        archives.import_archive(tmp_path / "copy", tmp_path, KEY)
    assert caplog.text == ""
    store.close()
    assert archives.import_archive(tmp_path / "copy", tmp_path, KEY) == 0


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the database was open; the same import is right when the disk is."""
    fill(tmp_path / "old").close()
    archive, new = tmp_path / "a.archive", tmp_path / "new"
    archives.export_database(tmp_path / "old", KEY, archive)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken on purpose")

    says = pytest.raises(DatabaseError, match="cannot be written; the log says why")
    with monkeypatch.context() as patch, says:
        archives.import_archive(archive, new, KEY, lambda *_: patch.setattr(os, "fsync", fail))
    archives.import_archive(archive, new, KEY)
    assert contents(new) == contents(tmp_path / "old")


def test_what_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="File name too long"):
        archives.read_archive_key(tmp_path / ("a" * 300))


def test_damaged_and_foreign_archives_are_refused(tmp_path: Path) -> None:
    """Nothing of them is taken."""
    fill(tmp_path / "old").close()
    archive = tmp_path / "a.archive"
    archives.export_database(tmp_path / "old", KEY, archive)
    data = archive.read_bytes()
    for damaged in (b"", data[:-1], data[:200] + bytes([data[200] ^ 1]) + data[201:]):
        archive.write_bytes(damaged)
        with pytest.raises(SnapshotError, match="corrupt"):
            archives.import_archive(archive, tmp_path / "new", KEY)
    archive.write_bytes(data)
    other = DatabaseKey(KEY.model, "e" * 32)
    with pytest.raises(SnapshotError, match="another tokenizer"):
        archives.import_archive(archive, tmp_path / "new", other)
    assert not (tmp_path / "new").exists()
    with pytest.raises(DatabaseError, match="exists already"):
        archives.export_database(tmp_path / "old", KEY, archive)


def test_the_commands(tmp_path: Path) -> None:
    """Export, import for another model of the tokenizer, and look at both."""

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["database", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    fill(tmp_path / "old").close()
    old, new, archive = str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "file")
    exported = json.loads(run("export", old, archive, "--json"))
    assert exported["num_outputs"] == 60
    assert exported["num_bytes"] == Path(archive).stat().st_size
    assert "60 new outputs" in run("import", archive, new, "--model", "successor")
    (found,) = json.loads(run("info", new, "--json"))
    small = tmp_path / "config.yaml"
    models = [{"name": "m", "model": "m"}]
    small.write_text(json.dumps({"models": models, "model_database": {"max_bytes": 2**16}}))
    assert "0 new outputs" in run(
        "import", archive, new, "--model", "successor", "--config", str(small)
    )
    assert found["model"] == "successor"
    assert found["namespaces"]["tenant"]["num_outputs"] == 30
    assert "successor" in run("info", new)


def test_what_could_not_be_exported_is_told(tmp_path: Path) -> None:
    """A backup without it is kept, and passes for none that succeeded."""
    fill(tmp_path / "old").close()
    (chunk, *_) = sorted(database_directory(tmp_path / "old", KEY).glob("*/*.chunk"))
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    archive = tmp_path / "file"
    export = ["database", "export", str(tmp_path / "old"), str(archive), "--json"]
    result = CliRunner().invoke(app, export, catch_exceptions=False)
    assert result.exit_code == 1
    assert f"hdserve: {archive} lacks what 1 files hold that could not be used" in result.stderr
    exported = json.loads(result.stdout)
    assert exported["num_refused_files"] == 1
    assert 0 < exported["num_outputs"] < 60
    new = tmp_path / "new"
    assert archives.import_archive(archive, new, KEY) == exported["num_outputs"]


def test_archives_of_every_version_can_be_taken(tmp_path: Path) -> None:
    """They carry databases over a change of the form; a new version adds a file, and reads those
    there are.  Written by ``fill`` with two outputs."""
    paths = sorted(Path(__file__).parent.glob("format-*.archive"))
    assert [path.stem for path in paths] == [f"format-{FORMAT_VERSION}"]
    for path in paths:
        root = tmp_path / path.stem
        assert archives.read_archive_key(path) == KEY
        assert archives.import_archive(path, root, KEY) == 4
        assert contents(root) == {"default": [[0] * 7, [1] * 7], "tenant": [[0] * 7, [1] * 7]}
        assert [item.has_calibration for item in stored.describe(root, KEY).namespaces] == [
            True,
            False,
        ]


@pytest.mark.parametrize("place", ["none/deeper", "/proc"])
def test_no_directory_is_made_for_an_archive(tmp_path: Path, place: str) -> None:
    """It would be that of a mistyped path; and one that takes no files is not one in use."""
    fill(tmp_path / "root").close()
    archive = tmp_path / place / "a.hdb"
    with pytest.raises(DatabaseError, match=rf"^{archive} cannot be written: .*No such file"):
        archives.export_database(tmp_path / "root", KEY, archive)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_what_lies_in_a_closed_directory_is_an_error_that_names_it(tmp_path):
    inside = tmp_path / "closed"
    fill(tmp_path / "open").close()
    inside.mkdir()
    with closed(inside):
        for call in (
            lambda: stored.find_databases(inside / "db"),
            lambda: stored.describe(inside / "db", KEY),
            lambda: archives.export_database(inside / "db", KEY, inside / "a.hdb"),
            lambda: corpus_files([inside / "texts.txt"]),
        ):
            with pytest.raises(DatabaseError, match="closed"):
                call()
