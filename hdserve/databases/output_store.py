"""The disk form of an :class:`OutputLog`: an append log for each tail, a snapshot for each chunk.

    <directory>/
        lock                     held by the one process that writes here
        generation               how often the log was opened, and the epochs it had
        <hash of a namespace>/
            state                flushed version and calibration
            <version>.log        the tail: one record per append
            <version>.chunk      a full chunk: compact, written atomically, never changed
            *.refused            a file that could not be used, set aside

An append is handed to the operating system before it is acknowledged, so a killed process loses
nothing; ``sync`` brings everything to the disk itself, so a power failure loses at most what
came after the last one.  ``sync`` also turns the logs of full chunks into snapshots and deletes
what was evicted.  Each file is checked and refused by itself.

A failed write never stops the log in memory: the chunk concerned is written again, whole, by
the next ``sync`` that succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from hdserve.databases import snapshot
from hdserve.databases.append_log import AppendLog
from hdserve.databases.output_files import (
    RestoredFile,
    directory_name,
    encode_chunk,
    encode_log_head,
    encode_state,
    read_chunk,
    read_log,
    read_state,
    versioned_files,
)
from hdserve.databases.output_log import OutputLog
from hdserve.databases.partition import Appended, Partition
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, SnapshotError

logger = logging.getLogger(__name__)

VERSIONS_PER_GENERATION = 2**32
"""Each opening numbers its outputs from a new multiple, so a version never names two outputs."""

_MAX_EPOCHS = 64


@dataclass(slots=True)
class _Namespace:
    """What is on disk of one namespace, by the first version of each file."""

    directory: Path
    logs: set[int] = field(default_factory=set)
    chunks: set[int] = field(default_factory=set)
    unsaved: set[int] = field(default_factory=set)
    is_state_saved: bool = True
    is_synced: bool = True

    def log_path(self, version: int) -> Path:
        return self.directory / f"{version:016x}.log"

    def chunk_path(self, version: int) -> Path:
        return self.directory / f"{version:016x}.chunk"


class OutputStore:
    """The files of one database.

    Not thread-safe; another process that opens the same directory may only read, until the first
    one has ended: then its next ``sync`` takes over, with all it has kept in memory so far.

    Args:
        directory: of this database alone; it is made.
        key: whose output it is; other files are refused.
        lock_timeout_s: how long to wait for a predecessor that is about to end.
        is_read_only: whether to leave everything on disk as it is.

    Attributes:
        epoch: a new id of this opening.
        epochs: ids of the earlier openings whose version numbers are still valid.
        generation: the number of this opening, from 1.
        is_writable: whether this process holds the lock.
        num_failures: writes that failed.
        num_refused: files that could not be used.

    Raises:
        DatabaseError: the directory cannot be made or read.
    """

    def __init__(
        self,
        directory: Path,
        key: DatabaseKey,
        lock_timeout_s: float = 5.0,
        *,
        is_read_only: bool = False,
    ) -> None:
        self.directory = directory
        self.num_failures = 0
        self.num_refused = 0
        self.epoch = uuid4().hex
        self._key = key
        self._namespaces: dict[str, _Namespace] = {}
        self._may_take_over = not is_read_only
        self._lock = FileLock(directory / "lock", thread_local=False)
        try:
            self.is_writable = False
            if not is_read_only:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.is_writable = self._acquire(lock_timeout_s)
                if not self.is_writable:
                    logger.error(
                        "%s is in use by another process: its outputs are read, new ones stay in "
                        "memory until it ends",
                        directory,
                    )
            self.generation, self.epochs = self._open_generation()
        except OSError as error:
            raise DatabaseError(f"{directory} cannot be used: {error}") from error

    @property
    def first_version(self) -> int:
        """Where the version numbers of this opening begin."""
        return self.generation * VERSIONS_PER_GENERATION

    def close(self) -> None:
        """Let another process write."""
        self.is_writable = self._may_take_over = False
        self._lock.release()

    def restore(self, log: OutputLog) -> None:
        """Fill the empty ``log``; what cannot be used is logged, set aside and left out."""
        for directory in sorted(path for path in self.directory.iterdir() if path.is_dir()):
            self._remove_temporary_files(directory)
            flushed_version = self._restore_state(directory / "state", log)
            for version, restored in self._restored_files(directory, flushed_version):
                log.restore(restored.namespace, version, restored.segment)

    def append(self, namespace: str, appended: Appended) -> None:
        """Keep what was just appended to the log."""
        if not self.is_writable:
            return
        version = appended.chunk_version
        files = self._files(namespace)
        files.is_synced = False
        if version in files.unsaved:
            return
        try:
            log = AppendLog(files.log_path(version))
            if version not in files.logs:
                files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                log.append(encode_log_head(namespace, self._key))
                files.logs.add(version)
            log.append(snapshot.pack(appended.segment.to_wire()))
        except OSError as error:
            files.unsaved.add(version)
            self._count_failure(error)

    def state_changed(self, namespace: str) -> None:
        """Have the next ``sync`` write calibration and flushed version."""
        self._files(namespace).is_state_saved = False

    def flush(self, namespace: str, log: OutputLog) -> None:
        """Delete the files of ``namespace`` at once, those set aside included.

        Call it after ``log.flush``.  The flushed version is written first, so that files which a
        crash leaves behind are not read again.

        Raises:
            DatabaseError: they could not be deleted.
        """
        if not self.is_writable:
            raise DatabaseError(f"{self.directory} is in use by another process")
        files = self._files(namespace)
        try:
            self._write_state(namespace, files, log.partition(namespace))
            for path in files.directory.iterdir():
                if path.name != "state":
                    path.unlink()
            snapshot.sync_directory(files.directory)
        except OSError as error:
            raise DatabaseError(f"{files.directory} cannot be deleted: {error}") from error
        self._namespaces[namespace] = _Namespace(files.directory)

    def sync(self, log: OutputLog) -> bool:
        """Bring everything to the disk; ``False`` if some of it failed and is tried again."""
        if not self.is_writable and not self._take_over(log):
            return False
        is_complete = True
        for namespace, files in self._namespaces.items():
            partition = log.partition(namespace)
            try:
                self._sync_namespace(namespace, files, partition)
            except OSError as error:
                is_complete = False
                self._count_failure(error)
        return is_complete

    def _acquire(self, timeout_s: float) -> bool:
        try:
            self._lock.acquire(timeout=timeout_s)
        except Timeout:
            return False
        return True

    def _take_over(self, log: OutputLog) -> bool:
        """Write from now on, if the process that did has ended.

        Not if it opened the directory once more in between: its numbers would be ours.
        """
        if not self._may_take_over or not self._acquire(0.0):
            return False
        generation, epochs = self._read_generation()
        try:
            self._may_take_over = generation < self.generation
            if self._may_take_over:
                self._write_generation(epochs)
                self.is_writable = True
        except OSError as error:
            self._count_failure(error)
        if not self.is_writable:
            self._lock.release()
            return False
        logger.info("%s is free, and written from now on", self.directory)
        for namespace in log.namespaces():
            files = self._files(namespace)
            versions = [version for version, _ in log.partition(namespace).segments()]
            files.unsaved |= {version for version in versions if version >= self.first_version}
            files.logs.clear()  # the predecessor's, which may have grown: for the next restart
            files.is_synced = False
        return True

    def _open_generation(self) -> tuple[int, tuple[str, ...]]:
        """Number this opening and remember its epoch."""
        generation, epochs = self._read_generation()
        highest = max(
            (version for _, version in versioned_files(self.directory.glob("*/*"))), default=0
        )
        self.generation = max(generation, highest // VERSIONS_PER_GENERATION) + 1
        if self.is_writable:
            self._write_generation(epochs)
        return self.generation, epochs

    def _write_generation(self, epochs: tuple[str, ...]) -> None:
        payload = {"generation": self.generation, "epochs": [*epochs, self.epoch][-_MAX_EPOCHS:]}
        data = snapshot.encode(payload, kind="generation", key=self._key)
        snapshot.write_file(self.directory / "generation", data)

    def _read_generation(self) -> tuple[int, tuple[str, ...]]:
        """The number and the epochs of the last opening that could write."""
        path = self.directory / "generation"
        generation, epochs = 0, []
        if path.exists():
            try:
                payload = snapshot.read_file(
                    path,
                    kind="generation",
                    fingerprint=self._key.fingerprint,
                    model=self._key.model,
                )
                generation, epochs = int(payload["generation"]), list(payload["epochs"])
            except (SnapshotError, KeyError, TypeError, ValueError) as error:
                self._set_aside(path, error)
        return generation, tuple(epochs)

    def _restored_files(
        self, directory: Path, flushed_version: int
    ) -> Iterator[tuple[int, RestoredFile]]:
        """First version and content of each usable file, in order."""
        for path, version in sorted(
            versioned_files(directory.iterdir()), key=lambda item: (item[1], item[0].suffix)
        ):
            is_log = path.suffix == ".log"
            if version < flushed_version or (is_log and path.with_suffix(".chunk").exists()):
                self._unlink(path)
                continue
            try:
                restored = (read_log if is_log else read_chunk)(path, self._key)
            except SnapshotError as error:
                self._set_aside(path, error)
                continue
            files = self._files(restored.namespace)
            if restored.flaw:
                self._set_aside(path, SnapshotError(restored.flaw))
                files.unsaved.add(version)
            else:
                (files.logs if is_log else files.chunks).add(version)
            files.is_synced = files.is_synced and not is_log
            yield version, restored

    def _restore_state(self, path: Path, log: OutputLog) -> int:
        """Take calibration and flushed version from ``path``; return the latter."""
        if not path.exists():
            return 0
        try:
            namespace, flushed_version, calibration = read_state(path, self._key)
        except SnapshotError as error:
            self._set_aside(path, error)
            return 0
        self._files(namespace)
        partition = log.partition(namespace)
        partition.flushed_version = flushed_version
        if calibration:
            partition.calibration = calibration
            partition.calibration_version = self.first_version
        return flushed_version

    def _sync_namespace(self, namespace: str, files: _Namespace, partition: Partition) -> None:
        oldest = min(files.chunks | files.logs, default=partition.first_version)
        if not files.is_synced or oldest < partition.first_version:
            self._sync_outputs(namespace, files, partition)
        if not files.is_state_saved:
            self._write_state(namespace, files, partition)

    def _write_state(self, namespace: str, files: _Namespace, partition: Partition) -> None:
        files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = encode_state(namespace, partition.flushed_version, partition.calibration, self._key)
        snapshot.write_file(files.directory / "state", data)
        files.is_state_saved = True

    def _sync_outputs(self, namespace: str, files: _Namespace, partition: Partition) -> None:
        if partition.tail_version in files.unsaved:
            partition.seal()
        segments = dict(partition.segments())
        for version in sorted((files.logs | files.unsaved) - {partition.tail_version}):
            if version in segments:
                self._write_chunk(namespace, files, version, segments[version])
            self._unlink(files.log_path(version))
            files.logs.discard(version)
            files.unsaved.discard(version)
        for version in sorted(files.chunks - segments.keys()):
            self._unlink(files.chunk_path(version))
            files.chunks.discard(version)
        for version in files.logs:
            AppendLog(files.log_path(version)).sync()
        if files.directory.exists():
            snapshot.sync_directory(files.directory)
        files.is_synced = True

    def _write_chunk(
        self, namespace: str, files: _Namespace, version: int, segment: Segment
    ) -> None:
        data = encode_chunk(namespace, segment, self._key)
        files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        snapshot.write_file(files.chunk_path(version), data)
        files.chunks.add(version)

    def _files(self, namespace: str) -> _Namespace:
        files = self._namespaces.get(namespace)
        if files is None:
            files = _Namespace(self.directory / directory_name(namespace))
            self._namespaces[namespace] = files
        return files

    def _set_aside(self, path: Path, error: Exception) -> None:
        self.num_refused += 1
        if not self.is_writable:
            logger.error("not used: %s", error)
            return
        refused = path.with_name(f"{path.name}.refused")
        logger.error("not used, and set aside as %s: %s", refused.name, error)
        try:
            path.replace(refused)
        except OSError as failure:
            self._count_failure(failure)

    def _remove_temporary_files(self, directory: Path) -> None:
        for path in directory.glob(".*.tmp"):
            self._unlink(path)

    def _unlink(self, path: Path) -> None:
        if self.is_writable:
            path.unlink(missing_ok=True)

    def _count_failure(self, error: OSError) -> None:
        if not self.num_failures:
            logger.error("%s cannot be written, going on in memory: %s", self.directory, error)
        self.num_failures += 1
