"""Model databases exported to one file, and imported from one.

An archive is an append log of :class:`~hdserve.databases.messages.Publish` messages, each of one
namespace, with its own checksum, model and tokenizer fingerprint.  It carries what a model
generated from one cluster to another; importing an output twice counts it once.  For a database in
use, its actor creates and imports the same messages.

The last message only marks the end, so that a file that was cut off is recognised.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from hdserve.access import NAMESPACE, NAMESPACE_RULE
from hdserve.databases import job_lock, snapshot
from hdserve.databases.append_log import AppendLog, iter_records
from hdserve.databases.kept import check_kept
from hdserve.databases.messages import Publish
from hdserve.databases.output_files import database_directory
from hdserve.databases.output_log import MAX_CALIBRATION_BYTES, OutputLog
from hdserve.databases.output_store import OutputStore
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.databases.stored import UNBOUNDED, check_current, check_unsharded, open_to_read
from hdserve.errors import DatabaseError, SnapshotError
from hdserve.journal import SUFFIX

MESSAGE_BYTES = 2**22

_SENDER, _END_SENDER = "archive-part", "archive-end"
"""The senders of all messages of an archive but the last, and of the last."""

_TOO_MANY_NAMESPACES = "it has too many namespaces; `model_database.max_total_bytes` bounds them"

Progress = Callable[[int, int], None]
"""Called with the number of outputs handled since the last call, and with the total number."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was exported.

    Attributes:
        num_refused_files: files of the database that could not be used or not be read: the archive
            lacks what they hold.
    """

    num_outputs: int
    num_refused_files: int


def export_database(
    root: Path, key: DatabaseKey, archive: Path, on_progress: Progress = lambda num, total: None
) -> Exported:
    """Write a database, which may be in use, into the new file ``archive``.

    Until it is complete it is ``archive.unfinished``.  If interrupted, that stays; the next export
    to the same file starts over.

    Raises:
        DatabaseError: the database cannot be read, the archive cannot be written or is being
            written by another export, or ``root`` now has shards, so this database no longer grows.
    """
    path = Path(f"{archive}.lock")
    try:
        _make_lock_file(path)
        lock = job_lock.take(path)
        try:
            return _export(root, key, archive, on_progress)
        finally:  # while it is held: a lock on a deleted file protects nothing
            path.unlink(missing_ok=True)
            lock.release()
    except Timeout as error:
        raise DatabaseError(f"{archive} is being written by another export") from error
    except OSError as error:
        raise DatabaseError(f"{archive} cannot be written: {error}") from error


def _make_lock_file(path: Path) -> None:
    """Make it, unless it exists; a lock would make directories, and take one where no file can be
    made for locked.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644))


def _export(root: Path, key: DatabaseKey, archive: Path, on_progress: Progress) -> Exported:
    files, log = open_to_read(root, key)
    check_current(root)
    total = sum(log.partition(name).num_outputs for name in log.namespaces())
    partial = archive.with_name(f"{archive.name}{SUFFIX}")
    try:
        if archive.exists():
            raise DatabaseError(f"{archive} exists already")
        partial.unlink(missing_ok=True)
        on_progress(0, total)
        target = AppendLog(partial)
        for message in _messages(log):
            target.append(message.encode(key))
            on_progress(message.num_outputs, total)
        target.sync()
        partial.rename(archive)
        snapshot.sync_directory(archive.absolute().parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise DatabaseError(f"{archive} cannot be written: {error}") from error
    return Exported(total, files.num_refused)


def read_archive_key(archive: Path) -> DatabaseKey:
    """The model and the tokenizer whose output an archive holds.

    Raises:
        SnapshotError: it cannot be read, or is not an archive.
    """
    return snapshot.read_key(next(_records(archive)))


def import_archive(
    archive: Path,
    root: Path,
    key: DatabaseKey,
    on_progress: Progress = lambda num, total: None,
    *,
    max_bytes: int = UNBOUNDED,
    max_total_bytes: int = UNBOUNDED,
    num_shards: int = 1,
) -> int:
    """Add what ``archive`` holds to the database of ``key`` below ``root``, created if needed.

    Calibration is only imported if there is none yet.

    Args:
        key: its model may differ from the archive's, its tokenizer may not.
        max_bytes, max_total_bytes: of a namespace, and of all, as the server has them that is to
            read the database.
        num_shards: of this server.

    Returns:
        The number of new outputs.

    Raises:
        SnapshotError: the archive is corrupt, cut off, of another tokenizer, or has entries that
            no database may have, see :func:`check_message`; nothing was added.
        DatabaseError: ``root`` has shards, or the server has, or it would not keep all there would
            be, and nothing was added; or the database is in use, or cannot be written.
    """
    check_unsharded(root, num_shards)
    total = 0
    for message in _imported(archive, key):
        check_message(message)
        total += message.num_outputs
    store = OutputStore(database_directory(root, key), key, lock_timeout_s=1.0)
    store.check_writable()
    try:
        log = OutputLog(UNBOUNDED, UNBOUNDED, first_version=store.first_version)
        store.restore(log)
        _check_limits(_imported(archive, key), log, max_bytes, max_total_bytes)
        num_new = 0
        for message in _imported(archive, key):
            num_new += take_message(message, log, store)
            on_progress(message.num_outputs, total)
        if not store.sync(log) or store.num_failures:
            raise DatabaseError(f"{store.directory} cannot be written; the log says why")
        return num_new
    finally:
        store.close()


def encode_end(key: DatabaseKey) -> bytes:
    """The last message of an archive, after those of :func:`next_message`."""
    return Publish(_END_SENDER).encode(key)


def is_continued(message: Publish) -> bool:
    """Whether more messages of its archive must follow this one."""
    return message.sender != _END_SENDER


def next_message(log: OutputLog, namespace: str, cursor: int) -> tuple[Publish, int, bool]:
    """A message of an archive for ``namespace``, from a cursor on that begins with 0.

    Returns:
        The message, with the calibration if it is the first; the cursor of the next one; whether
        this is the last.
    """
    found = log.changes_since({namespace: cursor}, max_bytes=MESSAGE_BYTES).get(namespace)
    if found is None:
        return Publish(_SENDER, {namespace: Segment.empty()}), cursor, True
    calibration = b"" if cursor else found.calibration
    calibrations = {namespace: calibration} if calibration else {}
    message = Publish(_SENDER, {namespace: found.segment}, calibrations)
    return message, found.cursor, found.is_complete


def take_message(message: Publish, log: OutputLog, store: OutputStore | None) -> int:
    """Add the outputs of an archive's message, and its calibration if there is none yet.

    Returns:
        The number of new outputs.

    Raises:
        SnapshotError: it has entries that no database may have, see :func:`check_message`, or
            more namespaces than this one may have; nothing was added.
    """
    check_message(message)
    if not log.has_room(message.namespaces):
        raise SnapshotError(_TOO_MANY_NAMESPACES)
    num_new = 0
    for namespace, segment in message.outputs.items():
        for appended in log.append(namespace, log.partition(namespace).as_imported(segment)):
            num_new += len(appended.segment)
            if store:
                store.append(namespace, appended)
    for namespace, calibration in message.calibrations.items():
        if not log.partition(namespace).calibration:
            changed = log.set_calibration(namespace, calibration)
            if store:
                store.state_changed(*changed)
    return num_new


def check_message(message: Publish) -> None:
    """
    Raises:
        SnapshotError: a namespace could not belong to any key, or a calibration is too large.
    """
    for name in message.namespaces:
        if not NAMESPACE.fullmatch(name):
            raise SnapshotError(f"it has a namespace {name[:100]!r}; {NAMESPACE_RULE}")
    largest = max(map(len, message.calibrations.values()), default=0)
    if largest > MAX_CALIBRATION_BYTES:
        raise SnapshotError(
            f"a calibration of {largest} bytes is over the {MAX_CALIBRATION_BYTES} allowed"
        )


def _check_limits(
    messages: Iterable[Publish], log: OutputLog, max_bytes: int, max_total_bytes: int
) -> None:
    """
    Raises:
        DatabaseError: with all these messages ``log`` would be over a limit.
    """
    new: Counter[str] = Counter()
    for message in messages:
        new.update(dict.fromkeys(message.calibrations, 0))
        for namespace, segment in message.outputs.items():
            new[namespace] += log.peek(namespace).num_bytes_imported(segment)
    if not log.has_room(new, max_total_bytes):
        raise DatabaseError(_TOO_MANY_NAMESPACES)
    check_kept(log, new, max_bytes, max_total_bytes)


def _messages(log: OutputLog) -> Iterator[Publish]:
    """Messages with the calibration of each namespace and then its outputs; then the end."""
    for namespace in log.namespaces():
        partition = log.partition(namespace)
        calibrations = {namespace: partition.calibration} if partition.calibration else {}
        yield Publish(_SENDER, {namespace: Segment.empty()}, calibrations)
        for _, segment in partition.segments():
            for part in segment.split(MESSAGE_BYTES):
                yield Publish(_SENDER, {namespace: part})
    yield Publish(_END_SENDER)


def _imported(archive: Path, key: DatabaseKey) -> Iterator[Publish]:
    """The messages of an archive one by one; the file may be larger than the memory.

    Raises:
        SnapshotError: it is corrupt, cut off, or of another tokenizer.
    """
    has_more = False
    for data in _records(archive):
        message = Publish.decode(data, key.fingerprint, model=None)
        has_more = is_continued(message)
        yield message
    if has_more:
        raise SnapshotError(f"{archive}: truncated or corrupt: it ends before its last record")


def _records(archive: Path) -> Iterator[bytes]:
    """The records of an archive, at least one.

    Raises:
        SnapshotError: the file cannot be read, or is not an archive.
    """
    is_empty = True
    for body in iter_records(archive):
        is_empty = False
        yield body
    if is_empty:
        raise SnapshotError(f"{archive}: truncated or corrupt: it is empty")
