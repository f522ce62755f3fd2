"""The disk form of an :class:`OutputLog`: an append log for each tail, a snapshot for each chunk.

    <directory>/
        lock                     held by the one process that writes here
        generation               how often the log was opened, and the epochs of those openings
        generation.spare         room for the next one
        <hash of a namespace>/
            state                flushed version, calibration and what was evicted
            <version>.log        the tail: one record per append
            <version>.chunk      a full chunk: compact, written atomically, never changed
            *.refused            a file that could not be used, set aside; .refused-2 a second one

An append is handed to the operating system before it is acknowledged, so a killed process loses
nothing; ``sync`` writes everything to the disk itself, so a power failure loses at most what came
after the last sync.  ``sync`` also turns the logs of full chunks into snapshots and deletes what
was evicted.

A failed write never stops the log in memory: the chunk concerned is written again, whole, by the
next ``sync`` that succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from hdserve.databases import snapshot
from hdserve.databases.append_log import OpenLogs
from hdserve.databases.database_files import DatabaseFiles
from hdserve.databases.generation_file import VERSIONS_PER_GENERATION
from hdserve.databases.namespace_files import NamespaceFiles
from hdserve.databases.output_files import directory_name, encode_log_head, versioned_files
from hdserve.databases.output_log import OutputLog
from hdserve.databases.partition import Appended
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, DatabaseInUse

logger = logging.getLogger(__name__)

_NUM_LEFT_FREE = 1024
"""Generations that a waiting process skips, for restarts of the process that writes."""

_NO_LOCK = nullcontext()


class OutputStore:
    """The files of one database.

    Not thread-safe.  Another process that opens the same directory may only read until the writer
    has ended; then its next ``sync`` takes over, with everything it has kept in memory so far.  The
    same happens if nothing could be written at opening, as soon as writing works.  Of several
    waiting processes one takes over; the others are then overtaken, and must reopen.  While
    waiting, each ``sync`` flushes what the writer has flushed; what that adds afterwards is taken
    over, too.

    Args:
        directory: used by this database alone; created if needed.
        key: of the database; files with another key are refused.
        lock_timeout_s: how long to wait for a predecessor that is about to end.

    Attributes:
        epoch: a new id of this opening.
        epochs: ids of the earlier openings whose version numbers are still valid.
        generation: the number of this opening, from 1.
        is_overtaken: whether another waiting process has written since this one was opened: its
            numbers may equal ours, so this store no longer writes.  Close it, and continue with a
            new store and a new log, to which newer outputs are added.
        is_closed: whether ``close`` was called; to write again, do the same.

    Raises:
        DatabaseError: the directory cannot be read; this may be temporary.
    """

    def __init__(self, directory: Path, key: DatabaseKey, lock_timeout_s: float = 5.0) -> None:
        self.directory = directory
        self.epoch = uuid4().hex
        self._key = key
        self._files = DatabaseFiles(directory, key)
        self._logs = OpenLogs()
        self._flushed_here: set[str] = set()
        self.is_overtaken = False
        self.is_closed = False
        # a lock file instead of a lock would outlive a killed process, for other nodes for ever
        self._lock = FileLock(directory / "lock", thread_local=False, fallback_to_soft=False)
        try:
            self._begin_writing(lock_timeout_s)
            self._open_generation()
        except OSError as error:
            self._lock.release()
            raise DatabaseError(f"{directory} cannot be used: {error}") from error

    @property
    def first_version(self) -> int:
        """The first version number of this opening."""
        return self.generation * VERSIONS_PER_GENERATION

    @property
    def is_writable(self) -> bool:
        """Whether this process holds the lock, and could write when it took it."""
        return self._files.is_writable

    @property
    def is_failing(self) -> bool:
        """Whether something could not be written, and still is not."""
        return self._files.is_failing

    @property
    def num_failures(self) -> int:
        """Writes that failed."""
        return self._files.num_failures

    @property
    def num_refused(self) -> int:
        """Files that could not be used or not be read."""
        return self._files.num_refused

    @property
    def why_unwritten(self) -> str:
        """Why the last ``sync`` could not write everything."""
        try:
            self.check_writable()
        except DatabaseError as error:
            return error.message
        return f"{self.directory} cannot be written: {self._files.failure}"

    def close(self) -> None:
        """Let another process write."""
        self.is_closed = True
        self._files.is_writable = False
        for files in self._files.namespaces.values():
            self._close_logs(files)
        self._lock.release()

    def check_writable(self) -> None:
        """
        Raises:
            DatabaseInUse: another process is writing here.
            DatabaseError: nothing can be written.
        """
        if self.is_writable:
            return
        if self._files.failure:
            raise DatabaseError(f"{self.directory} cannot be written: {self._files.failure}")
        if self.is_overtaken:
            raise DatabaseError(
                f"{self.directory} was written by another process meanwhile, and must be opened "
                "again"
            )
        raise DatabaseInUse(
            f"{self.directory} is in use by another process, such as a running application"
        )

    def restore(self, log: OutputLog) -> None:
        """Fill the empty ``log``; unusable files are logged, set aside and left out.

        Raises:
            DatabaseError: the directory or a state cannot be read, perhaps temporarily: ``log`` is
                incomplete, so close this store, and retry with a new store and a new log.
        """
        if not self.is_writable and not self._files.failure:
            logger.error(
                "%s is in use by another process: its outputs are read, new ones stay in "
                "memory until it ends",
                self.directory,
            )
        try:
            self._files.restore(log)
        except OSError as error:
            raise DatabaseError(f"{self.directory} cannot be read: {error}") from error
        if self.is_writable and any(files.unsaved for files in self._files.namespaces.values()):
            self.sync(log)  # the usable part of files that were set aside is nowhere else

    def is_incomplete(self, namespace: str) -> bool:
        """Whether, when this was opened, a file of ``namespace`` could not be used, then or at any
        time before, or outputs were missing between others."""
        return directory_name(namespace) in self._files.incomplete

    def has_flushed(self, namespace: str) -> bool:
        """Whether this process has flushed ``namespace``, and the disk does not know it yet."""
        return namespace in self._flushed_here

    def knows_newer_flush(self, namespace: str, than: OutputStore) -> bool:
        """Whether ``namespace`` was flushed on disk after ``than`` last read it."""
        here, there = (each._files.flushed_versions.get(namespace, 0) for each in (self, than))
        return here > there

    def append(self, namespace: str, appended: Appended) -> None:
        """Write what was just appended to the log."""
        if not self.is_writable:
            return
        version = appended.chunk_version
        files = self._files.of(namespace)
        files.is_synced = False
        if version in files.unsaved:
            return
        try:
            path = files.log_path(version)
            if version not in files.logs:
                files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._logs.append(path, encode_log_head(namespace, self._key), creates=True)
                files.logs.add(version)
            self._logs.append(path, snapshot.pack(appended.segment.to_wire()))
        except OSError as error:
            files.unsaved.add(version)
            self._files.count_failure(error)

    def state_changed(self, *namespaces: str) -> None:
        """Have the next ``sync`` write their calibrations and flushed versions."""
        for namespace in namespaces:
            self._files.of(namespace).is_state_saved = False

    def flush(self, namespace: str, log: OutputLog) -> None:
        """Delete the files of ``namespace`` at once, including those set aside.

        Call it after ``log.flush``.

        Raises:
            DatabaseInUse: another process is writing here; they are deleted when it has ended.
            DatabaseError: they could not be deleted; each ``sync`` tries again.
        """
        files = self.flush_later(namespace)
        try:
            self.check_writable()
        except DatabaseInUse as error:
            raise DatabaseInUse(
                f"namespace {namespace} was forgotten in memory, but another process owns the "
                f"files: {error.message}. They are deleted when it has ended; send the request to "
                "that process too, or again afterwards"
            ) from error
        try:
            self._sync_namespace(namespace, log, _NO_LOCK)
        except OSError as error:
            raise DatabaseError(f"{files.directory} cannot be deleted: {error}") from error

    def flush_later(self, namespace: str) -> NamespaceFiles:
        """Have the next ``sync`` delete the files from before the flushed version."""
        self._flushed_here.add(namespace)
        return self._flush_files(namespace)

    def _flush_files(self, namespace: str) -> NamespaceFiles:
        files = self._files.of(namespace)
        files.is_flush_due, files.is_state_saved, files.is_synced = True, False, False
        return files

    def sync(self, log: OutputLog, lock: AbstractContextManager[object] = _NO_LOCK) -> bool:
        """Write everything to the disk; ``False`` if some of it failed and will be tried again.

        Args:
            lock: guards ``log`` and this object; not held while waiting for the disk, so appends
                continue, except to take over.  Nothing else may sync or flush meanwhile.
        """
        if not self.is_writable and not self._follow(log, lock):
            return False
        with lock:
            if not self.is_writable and not self._take_over(log):
                return False
            namespaces = list(self._files.namespaces)
            num_failures = self.num_failures
        is_complete = True
        for namespace in namespaces:
            try:
                self._sync_namespace(namespace, log, lock)
            except OSError as error:
                is_complete = False
                with lock:
                    self._files.count_failure(error)
        with lock:
            if self.num_failures == num_failures:
                self._files.note_written()
        return is_complete

    def _begin_writing(self, lock_timeout_s: float) -> None:
        try:
            self._make_directory()
            self._files.is_writable = self._acquire(lock_timeout_s)
        except OSError as error:  # what is there can still be read
            self._files.count_failure(error)

    def _make_directory(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        snapshot.sync_directory(self.directory.parent)

    def _acquire(self, timeout_s: float) -> bool:
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout:
            return False
        return True

    def _follow(self, log: OutputLog, lock: AbstractContextManager[object]) -> bool:
        """Apply the flushes of the process that writes; whether they could be read."""
        if self.is_closed:
            return False
        try:
            flushes = list(self._files.flushes())
        except OSError as error:
            with lock:
                self._files.count_failure(error)
            return False
        with lock:
            self._take_flushes(flushes, log)
        return True

    def _take_over(self, log: OutputLog) -> bool:
        """Become the writer, if the previous one has ended.

        Not if another waiting process was writer in between: its numbers may equal ours.
        """
        try:
            self._make_directory()
            self._files.failure = None
            if not self._acquire(0.0):
                return False
            generation, epochs = self._newest_generation()
            if generation >= self.generation:
                self._give_way()
            else:
                self._take_flushes(self._files.flushes(), log)
                self._take_added_since_flush(log)
                self._write_generation(epochs)
                self._files.is_writable = True
        except OSError as error:
            self._files.count_failure(error)
        if not self.is_writable:
            self._lock.release()
            return False
        logger.info("%s is free, this process writes it from now on", self.directory)
        for namespace in log.namespaces():
            files = self._files.of(namespace)
            versions = [version for version, _ in log.partition(namespace).segments()]
            files.unsaved = {version for version in versions if version >= self.first_version}
            files.logs.clear()  # the predecessor's, which may have grown: for the next restart
            files.is_synced = False
        return True

    def _give_way(self) -> None:
        if not self.is_overtaken:
            logger.warning(
                "%s was written by another process meanwhile, and must be opened again",
                self.directory,
            )
        self.is_overtaken = True

    def _open_generation(self) -> None:
        """Number this opening and record its epoch."""
        generation, self.epochs = self._newest_generation()
        self.generation = generation + 1
        if not self.is_writable:
            self.generation += _NUM_LEFT_FREE
        if self.is_writable:
            try:
                self._write_generation(self.epochs)
            except OSError as error:
                self._files.count_failure(error)
                self._files.is_writable = False
                self._lock.release()

    def _newest_generation(self) -> tuple[int, tuple[str, ...]]:
        """The number and the epochs of the last opening that could write, according to
        ``generation`` or to the files of outputs."""
        generation, epochs = self._files.read_generation()
        versions = [version for _, version in versioned_files(self.directory.glob("*/*"))]
        flushed = [] if generation else [version for _, version in self._files.flushes()]
        highest = max([*versions, *flushed], default=0)
        return max(generation, highest // VERSIONS_PER_GENERATION), epochs

    def _take_flushes(self, flushes: Iterable[tuple[str, int]], log: OutputLog) -> None:
        """Flush here what the present or previous writer has flushed since the last read.

        All newer outputs in memory go too: nothing tells whether the flush was meant for them.
        """
        for namespace, flushed_version in flushes:
            if flushed_version > self._files.flushed_versions.get(namespace, 0):
                self._files.flushed_versions[namespace] = flushed_version
                log.flush(namespace)
                self._flush_files(namespace)

    def _take_added_since_flush(self, log: OutputLog) -> None:
        """Take what the previous writer added to namespaces after a flush that was followed here.

        Its files are older than the flush has become here, and are about to be deleted.
        """
        for namespace, files in self._files.namespaces.items():
            if files.is_flush_due and namespace not in self._flushed_here:
                version = self._files.flushed_versions[namespace]
                for segment in self._files.segments_since(namespace, version):
                    log.append(namespace, segment)

    def _write_generation(self, epochs: tuple[str, ...]) -> None:
        self._files.generation_file.write(self.generation, [*epochs, self.epoch])

    def _sync_namespace(
        self, namespace: str, log: OutputLog, lock: AbstractContextManager[object]
    ) -> None:
        """
        Raises:
            OSError: something could not be written, and is tried again by the next sync.
        """
        with lock:
            files, partition = self._files.of(namespace), log.peek(namespace)
            self._close_logs(files)
            work = files.take_work(partition)
            if work is None and files.is_empty and not partition.num_bytes:
                del self._files.namespaces[namespace]
        if work is None:
            return
        try:
            work.write(namespace, self._key)
        except BaseException:
            with lock:
                work.undo()
            raise
        with lock:
            work.finish()
            if work.is_flushed and not files.is_flush_due:
                self._flushed_here.discard(namespace)
                self._files.flushed_versions[namespace] = work.state.flushed_version

    def _close_logs(self, files: NamespaceFiles) -> None:
        """Close what is open of a namespace; a log that may have lost something is written again,
        whole."""
        for version in files.logs:
            try:
                self._logs.close(files.log_path(version))
            except OSError as error:
                files.unsaved.add(version)
                self._files.count_failure(error)
