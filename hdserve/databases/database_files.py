"""The files of one model database: read into a log, changed only by the process that may write.

Each file is checked, and refused, separately.  A failed read says nothing about a file's content:
such chunks and logs are left in place for the next start, and if any other file cannot be read,
the database is not opened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from hdserve.databases import snapshot
from hdserve.databases.generation_file import VERSIONS_PER_GENERATION, GenerationFile
from hdserve.databases.namespace_files import NamespaceFiles
from hdserve.databases.output_files import (
    NamespaceState,
    RestoredFile,
    UnbegunLog,
    directory_name,
    encode_chunk,
    read_chunk,
    read_log,
    read_state,
    versioned_files,
)
from hdserve.databases.output_log import OutputLog
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey, UnreadableFile
from hdserve.errors import SnapshotError

logger = logging.getLogger(__name__)


class DatabaseFiles:
    """The known files of one database.

    Args:
        directory: used by this database alone.
        key: of the database; files with another key are refused.

    Attributes:
        generation_file: numbers the openings.
        is_writable: whether the files may be changed.
        namespaces: the files of each.
        incomplete: names of directories where something is missing or was set aside.
        flushed_versions: of each namespace on disk, as it was read last.
        failure: why the last write failed; ``None`` if none has failed since it may write.
        is_failing: whether a write has failed since everything was last known to be written.
        num_failures: writes that failed.
        num_refused: files that could not be used or not be read.
    """

    def __init__(self, directory: Path, key: DatabaseKey) -> None:
        self.directory = directory
        self.generation_file = GenerationFile(directory, key)
        self.is_writable = False
        self.namespaces: dict[str, NamespaceFiles] = {}
        self.incomplete: set[str] = set()
        self.flushed_versions: dict[str, int] = {}
        self.failure: OSError | None = None
        self.is_failing = False
        self.num_failures = 0
        self.num_refused = 0
        self._key = key

    def of(self, namespace: str) -> NamespaceFiles:
        """The files of ``namespace``."""
        files = self.namespaces.get(namespace)
        if files is None:
            files = NamespaceFiles(self.directory / directory_name(namespace))
            self.namespaces[namespace] = files
        return files

    def read_generation(self) -> tuple[int, tuple[str, ...]]:
        """The number and the epochs of the last opening that could write; a file that cannot be
        used is set aside.

        Raises:
            OSError: it cannot be read.
        """
        try:
            return self.generation_file.read()
        except SnapshotError as error:
            _raise_if_unreadable(error)
            self.set_aside(self.generation_file.path, error)
            return 0, ()

    def restore(self, log: OutputLog) -> None:
        """Fill the empty ``log``; unusable files are logged, set aside and left out.

        Raises:
            OSError: the directory or a state file cannot be read.
        """
        self._remove_temporary_files(self.directory)
        for directory in sorted(path for path in _listed(self.directory) if path.is_dir()):
            self._remove_temporary_files(directory)
            if not self._restore_namespace(directory, log) or any(directory.glob("*.refused*")):
                self.incomplete.add(directory.name)
        log.end_restore()
        if self.is_writable:
            self._sync_logs()

    def _restore_namespace(self, directory: Path, log: OutputLog) -> bool:
        """Load the files of ``directory``; whether nothing is missing between them, or where chunks
        ended."""
        state = self._restore_state(directory / "state", log)
        end_version, is_whole = state.flushed_version, True
        places: list[tuple[int, int]] = []
        for version, restored in self._restored_files(directory, state.flushed_version):
            is_gap = version % VERSIONS_PER_GENERATION and version != end_version
            before = log.peek(restored.namespace)
            if is_gap and (before.num_outputs or not before.evicted.ranges()):
                is_whole = False
            log.restore(restored.namespace, version, restored.segment)
            end_version = version + len(restored.segment)
            places.append((version, end_version))
        return is_whole and not state.misses(places)

    def flushes(self) -> Iterator[tuple[str, int]]:
        """The flushed version of each namespace that is on disk now.

        Raises:
            OSError: a state cannot be read.
        """
        for path in self.directory.glob("*/state"):
            try:
                namespace, state = read_state(path, self._key)
            except SnapshotError as error:
                _raise_if_unreadable(error)
            else:
                yield namespace, state.flushed_version

    def segments_since(self, namespace: str, version: int) -> Iterator[Segment]:
        """The outputs of ``namespace`` that are on disk now, from ``version`` on.

        Raises:
            OSError: the directory cannot be read.
        """
        directory = self.of(namespace).directory
        if directory.exists():
            for _, restored in self._restored_files(directory, version):
                yield restored.segment

    def set_aside(self, path: Path, error: Exception) -> None:
        """Count an unusable file, and rename it."""
        self.num_refused += 1
        if not self.is_writable:
            logger.error("not used: %s", error)
            return
        refused = _free_name(path)
        logger.error("not used, and set aside as %s: %s", refused.name, error)
        try:
            path.replace(refused)
        except OSError as failure:
            self.count_failure(failure)

    def count_failure(self, error: OSError) -> None:
        """Note that a write failed."""
        if not self.is_failing:
            logger.error("%s cannot be written, going on in memory: %s", self.directory, error)
        self.num_failures += 1
        self.failure, self.is_failing = error, True

    def note_written(self) -> None:
        """Note that everything is written, including what had failed before."""
        if self.is_failing:
            logger.info("%s is written again, with all that came meanwhile", self.directory)
        self.is_failing = False

    def _restored_files(
        self, directory: Path, flushed_version: int
    ) -> Iterator[tuple[int, RestoredFile]]:
        """First version and content of each usable file, in order."""
        places = NamespaceFiles(directory)
        for version in sorted({number for _, number in versioned_files(_listed(directory))}):
            log, chunk = places.log_path(version), places.chunk_path(version)
            is_flushed = version < flushed_version
            if is_flushed:
                self._unlink(chunk)
                self._unlink(log)
            found = None if is_flushed else self._read_either(log, chunk)
            if found is None:
                continue
            path, restored = found
            if path == chunk:
                self._unlink(log)
            files = self.of(restored.namespace)
            is_log = path == log
            if restored.flaw:
                self._rescue(version, restored)
                self.set_aside(path, SnapshotError(restored.flaw))
            else:
                (files.logs if is_log else files.chunks).add(version)
            files.is_synced = files.is_synced and not is_log
            yield version, restored

    def _restore_state(self, path: Path, log: OutputLog) -> NamespaceState:
        """Load the state file ``path``, and return it."""
        nothing = NamespaceState(0, b"", {})
        if not path.exists():
            return nothing
        try:
            namespace, state = read_state(path, self._key)
        except SnapshotError as error:
            _raise_if_unreadable(error)
            self.set_aside(path, error)
            return nothing
        self.of(namespace)
        self.flushed_versions[namespace] = state.flushed_version
        partition = log.partition(namespace)
        partition.flushed_version = state.flushed_version
        partition.restore_evicted(state.evicted)
        if state.calibration:
            for name in log.put_calibration(namespace, state.calibration):
                self.of(name).is_state_saved = False
        return state

    def _read_either(self, log: Path, chunk: Path) -> tuple[Path, RestoredFile] | None:
        """The file that exists, if it is usable; the log is only used without a usable chunk.

        While this process may only read, another one may turn the log into a chunk, or delete it.
        """
        damaged: set[Path] = set()
        unread: UnreadableFile | None = None
        for path, read in ((chunk, read_chunk), (log, read_log), (chunk, read_chunk)):
            if path in damaged:
                continue
            try:
                return path, read(path, self._key)
            except UnbegunLog as error:
                logger.warning("left out: %s", error)
                self._unlink(path)
            except UnreadableFile as error:
                unread = unread if error.is_missing else error
            except SnapshotError as error:
                self.set_aside(path, error)
                damaged.add(path)
        if unread:
            self.num_refused += 1
            logger.error("not used, and left for the next start: %s", unread)
        return None

    def _rescue(self, version: int, restored: RestoredFile) -> None:
        """Write the usable part of a file that is about to be set aside."""
        files = self.of(restored.namespace)
        files.unsaved.add(version)
        if not self.is_writable or not len(restored.segment):
            return
        try:
            data = encode_chunk(restored.namespace, restored.segment, self._key)
            snapshot.write_file(files.chunk_path(version), data)
        except OSError as error:
            self.count_failure(error)
        else:
            files.unsaved.discard(version)
            files.chunks.add(version)

    def _sync_logs(self) -> None:
        """Sync what an earlier run wrote to the disk before anything newer: then a reader that has
        a later output also has the earlier ones."""
        for files in self.namespaces.values():
            try:
                if files.logs:
                    files.sync_logs()
            except OSError as error:
                self.count_failure(error)

    def _remove_temporary_files(self, directory: Path) -> None:
        for path in directory.glob(".*.tmp"):
            self._unlink(path)

    def _unlink(self, path: Path) -> None:
        if self.is_writable:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.count_failure(error)


def _raise_if_unreadable(error: SnapshotError) -> None:
    """
    Raises:
        OSError: the file could not be read, but may be intact.
    """
    if isinstance(error, UnreadableFile) and not error.is_missing:
        raise error.reason


def _free_name(path: Path) -> Path:
    """The new name for a file that cannot be used, next to earlier ones set aside."""
    number, found = 1, path.with_name(f"{path.name}.refused")
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}.refused-{number}")
    return found


def _listed(directory: Path) -> Sequence[Path]:
    """What is in a directory; nothing, if there is none, or none any longer."""
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
