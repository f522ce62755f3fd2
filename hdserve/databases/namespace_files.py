"""The files of one namespace, and what a sync writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hdserve.databases import snapshot
from hdserve.databases.append_log import AppendLog
from hdserve.databases.output_files import (
    NamespaceState,
    encode_chunk,
    encode_state,
    versioned_files,
)
from hdserve.databases.partition import Partition
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey


@dataclass(slots=True)
class NamespaceFiles:
    """The files of one namespace on disk, by the first version of each.

    Attributes:
        unsaved: chunks that were not written completely.
        is_flush_due: files from before the flushed version are still to be deleted.
        is_entered: the directory itself is known to be on the disk.
    """

    directory: Path
    logs: set[int] = field(default_factory=set)
    chunks: set[int] = field(default_factory=set)
    unsaved: set[int] = field(default_factory=set)
    is_state_saved: bool = True
    is_synced: bool = True
    is_flush_due: bool = False
    is_entered: bool = False

    @property
    def state_path(self) -> Path:
        return self.directory / "state"

    def log_path(self, version: int) -> Path:
        return self.directory / f"{version:016x}.log"

    def chunk_path(self, version: int) -> Path:
        return self.directory / f"{version:016x}.chunk"

    @property
    def is_empty(self) -> bool:
        """Whether none of them contains any output."""
        return not (self.logs or self.chunks or self.unsaved)

    def sync_logs(self) -> None:
        """Sync the logs in their current state to the disk.

        Raises:
            OSError: their content may be lost; the next sync writes it again.
        """
        try:
            for version in self.logs:
                AppendLog(self.log_path(version)).sync()
            snapshot.sync_directory(self.directory)
            snapshot.sync_directory(self.directory.parent)
        except OSError:
            self.unsaved |= self.logs
            raise

    def take_work(self, partition: Partition) -> SyncWork | None:
        """The work of a sync, if there is any; it counts as written from now on."""
        oldest = min(self.chunks | self.logs, default=partition.first_version)
        if self.is_synced and self.is_state_saved and oldest >= partition.first_version:
            return None
        if partition.tail_version in self.unsaved:
            partition.seal()
            self._join_unsaved(partition)
        segments = dict(partition.segments())
        ended = (self.logs | self.unsaved) - {partition.tail_version}
        is_state_due = not self.is_state_saved or bool(ended or self.chunks - segments.keys())
        kept = (self.chunks | ended) & segments.keys()
        state = NamespaceState(
            partition.flushed_version,
            partition.calibration,
            partition.evicted.ranges(),
            _ends({version: segments[version] for version in kept}),
        )
        work = SyncWork(
            files=self,
            chunks={version: segments[version] for version in sorted(ended & segments.keys())},
            ended_logs=ended,
            evicted_chunks=self.chunks - segments.keys(),
            open_logs=self.logs - ended,
            state=state,
            is_state_due=is_state_due,
            is_forgotten=partition.is_forgettable,
            is_flushed=self.is_flush_due,
        )
        self.is_synced = self.is_state_saved = True
        self.is_flush_due = False
        return work

    def _join_unsaved(self, partition: Partition) -> None:
        """Make one of the last two chunks, if neither is on the disk: in a long outage each sync
        adds one, however small."""
        versions = [version for version, _ in partition.chunks[-2:]]
        last = versions[-1]
        if last not in self.logs and self.unsaved.issuperset(versions) and partition.join_last():
            self.unsaved.remove(last)
            self.logs.add(last)  # what may have been begun of it is deleted


@dataclass(frozen=True, slots=True)
class SyncWork:
    """The work of one sync for a namespace, as of one moment.

    Only ``write`` waits for the disk, and it touches nothing that an append uses: appends continue
    in the tail, whose log is not among the ``ended_logs``.
    """

    files: NamespaceFiles
    chunks: dict[int, Segment]
    ended_logs: set[int]
    evicted_chunks: set[int]
    open_logs: set[int]
    state: NamespaceState
    is_state_due: bool
    is_forgotten: bool
    is_flushed: bool
    unsynced: set[int] = field(default_factory=set)
    """Logs that could not be synced: their content may be lost even if the next sync succeeds."""

    def write(self, namespace: str, key: DatabaseKey) -> None:
        """Write it to the disk.

        Unwanted files are deleted first, so that a full disk has room again, and so that no flushed
        output is left once the state says that it was flushed.

        Raises:
            OSError: some of it could not be written or deleted; call ``undo``.
        """
        files = self.files
        failure = self._delete_unwanted()
        if self.is_state_due and not self.is_forgotten:
            files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = encode_state(namespace, self.state, key)
            snapshot.write_file(files.state_path, state)
        for version, segment in self.chunks.items():
            files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = encode_chunk(namespace, segment, key)
            snapshot.write_file(files.chunk_path(version), data)
            files.log_path(version).unlink(missing_ok=True)
        for version in self.open_logs:
            self._sync_log(version)
        if files.directory.exists():
            snapshot.sync_directory(files.directory)
            if not files.is_entered:
                snapshot.sync_directory(files.directory.parent)
                files.is_entered = True
        if failure:
            raise failure

    def finish(self) -> None:
        """Call it once all of the work is written."""
        files = self.files
        files.chunks |= self.chunks.keys()
        files.chunks -= self.evicted_chunks
        if self.is_forgotten:
            files.is_entered = False
            with contextlib.suppress(OSError):
                files.directory.rmdir()
        files.logs -= self.ended_logs
        files.unsaved -= self.ended_logs

    def undo(self) -> None:
        """Call it if some of the work failed: the next sync does all of it again."""
        files = self.files
        files.chunks |= self.chunks.keys()
        files.unsaved |= self.unsynced
        files.is_synced = False
        files.is_state_saved = files.is_state_saved and not self.is_state_due
        files.is_flush_due = files.is_flush_due or self.is_flushed

    def _sync_log(self, version: int) -> None:
        try:
            AppendLog(self.files.log_path(version)).sync()
        except OSError:
            self.unsynced.add(version)
            raise

    def _delete_unwanted(self) -> OSError | None:
        """Delete what the log in memory no longer has; returns the error if some of that failed."""
        failure = None
        for path in [*self._evicted(), *(self._flushed() if self.is_flushed else ())]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failure = error
        return failure

    def _evicted(self) -> Iterator[Path]:
        yield from map(self.files.chunk_path, self.evicted_chunks)
        yield from map(self.files.log_path, self.ended_logs - self.chunks.keys())
        if self.is_state_due and self.is_forgotten:
            yield self.files.state_path

    def _flushed(self) -> Iterator[Path]:
        """Files from before the flushed version, and files that were set aside."""
        directory = self.files.directory
        paths = list(directory.iterdir()) if directory.exists() else []
        newer = {
            path
            for path, version in versioned_files(paths)
            if version >= self.state.flushed_version
        }
        return (path for path in paths if path not in {*newer, self.files.state_path})


def _ends(chunks: Mapping[int, Segment]) -> tuple[int, ...]:
    """The ends of chunks that no other chunk continues."""
    ends = {version + len(segment) for version, segment in chunks.items()}
    return tuple(sorted(ends - chunks.keys()))
