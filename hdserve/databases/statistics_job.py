"""A job that writes a statistics database, and continues where it was interrupted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic

from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_checkpoint import Checkpoint, ProgressT
from hdserve.databases.statistics_info import StatisticsInfo
from hdserve.databases.target_lock import TargetLock
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
        self._lock = TargetLock(directory)
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
