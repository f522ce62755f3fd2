"""A job that writes a statistics database, and continues where it was interrupted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import ClassVar, Generic

from filelock import Timeout

from hdserve.databases import job_lock
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_checkpoint import Checkpoint, ProgressT
from hdserve.databases.statistics_info import CHECKPOINT_NAME, StatisticsInfo
from hdserve.errors import DatabaseError


class StatisticsJob(ABC, Generic[ProgressT]):
    """One job; no other may write to its directory until it has run.

    The database appears whole at the end; if interrupted, only the unfinished state was written, in
    ``unfinished/`` below the directory.

    Args:
        directory: where the database is written.
        builder: counts its content.
        begun: the progress at the start of a new job.

    Attributes:
        kind: the name of the job.
        counted: the field of its progress that grows, from 0.
        num_resumed: its value from an interrupted job that this one continues.

    Raises:
        DatabaseError: the unfinished job in ``directory`` has other inputs or settings, or another
            job is writing there.
    """

    kind: ClassVar[str]
    counted: ClassVar[str]

    def __init__(self, directory: Path, builder: StatisticsBuilder, begun: ProgressT) -> None:
        self._directory = directory
        self._builder = builder
        self._begun = begun
        self._checkpoint = Checkpoint(directory, type(begun))
        self._lock = _TargetLock(directory)
        try:
            self.num_resumed = self._resume()
        except BaseException:
            self._lock.release()
            raise

    def _progress(self, num_done: int) -> ProgressT:
        return self._begun.model_copy(update={self.counted: num_done})

    def _resume(self) -> int:
        saved = self._checkpoint.load()
        if saved is None:
            return 0
        progress, database = saved
        num_done: int = getattr(progress, self.counted)
        if progress != self._progress(num_done):
            raise DatabaseError(
                f"{self._checkpoint.directory}: an unfinished {self.kind} of other inputs or "
                "settings; finish or delete it"
            )
        self._builder.restore(database)
        return num_done

    def run(self) -> StatisticsInfo:
        """Count everything and write the database.

        Raises:
            DatabaseError: an input cannot be read or does not fit, or nothing can be written.
        """
        try:
            self._count_all()
            info = self._builder.write(self._directory)
            self._checkpoint.remove()
            return info
        finally:
            self._lock.release()

    @abstractmethod
    def _count_all(self) -> None:
        """Count what was not counted before, and save the state from time to time."""

    def _save(self, num_done: int) -> None:
        self._checkpoint.save(self._builder, self._progress(num_done))


class _TargetLock:
    """Keeps two jobs from writing one database at a time, as far as the file system has locks; held
    from its creation until it is released, or its process ends.

    Args:
        directory: to be written; it is created, and removed again if nothing was written.

    Raises:
        DatabaseError: another job holds it, or nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / f"{CHECKPOINT_NAME}.lock"
        self._made = list(
            takewhile(lambda each: not each.exists(), (directory, *directory.parents))
        )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = job_lock.take(self._path)
        except Timeout as error:
            raise DatabaseError(f"{directory}: is being written by another job") from error
        except OSError as error:
            raise DatabaseError(f"{directory}: cannot be written: {error}") from error

    def release(self) -> None:
        """Let another job write.  The file is deleted first, while it is still locked."""
        self._path.unlink(missing_ok=True)
        self._lock.release()
        with suppress(OSError):  # until the first that is not empty
            for directory in self._made:
                directory.rmdir()
