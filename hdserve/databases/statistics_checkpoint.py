"""The unfinished state of a job that writes a statistics database."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from hdserve.config import StrictModel
from hdserve.databases.snapshot import sync_directory, write_file
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import CHECKPOINT_NAME
from hdserve.errors import DatabaseError, SnapshotError

PROGRESS_NAME = "progress.json"

ProgressT = TypeVar("ProgressT", bound=StrictModel)


class Checkpoint(Generic[ProgressT]):
    """The unfinished database, stored near its destination, and how far the job has come.

    Args:
        directory: of the database to be finished; the state is in ``unfinished/`` below it.
        progress_model: the type of the progress record.
    """

    def __init__(self, directory: Path, progress_model: type[ProgressT]) -> None:
        self.directory = directory / CHECKPOINT_NAME
        self._new = directory / f"{CHECKPOINT_NAME}.new"
        self._old = directory / f"{CHECKPOINT_NAME}.old"
        self._progress_model = progress_model

    def load(self) -> tuple[ProgressT, StatisticsDatabase] | None:
        """The state saved last; ``None`` if there is none.

        Raises:
            DatabaseError: it is corrupt, or of another kind of job.
        """
        try:
            if not self._find():
                return None
            written = (self.directory / PROGRESS_NAME).read_bytes()
            progress = self._progress_model.model_validate_json(written)
            database = StatisticsDatabase.open(self.directory)
            database.verify()
        except (ValidationError, OSError, SnapshotError) as error:
            raise DatabaseError(
                f"{self.directory}: an unfinished job cannot be resumed; delete it: {error}"
            ) from error
        return progress, database

    def _find(self) -> bool:
        """Whether a state was saved; moves it into place if an interruption prevented
        that.

        Raises:
            OSError: it cannot be moved.
        """
        for saved in (self.directory, self._new, self._old):
            if (saved / PROGRESS_NAME).is_file():
                if saved != self.directory:
                    shutil.rmtree(self.directory, ignore_errors=True)
                    saved.rename(self.directory)
                return True
        return False

    def save(self, builder: StatisticsBuilder, progress: ProgressT) -> None:
        """Replace the saved state; an interruption leaves either the old or the new one, whole.

        Raises:
            DatabaseError: it cannot be written.
        """
        shutil.rmtree(self._new, ignore_errors=True)
        builder.write(self._new)
        try:
            write_file(self._new / PROGRESS_NAME, progress.model_dump_json().encode())
            shutil.rmtree(self._old, ignore_errors=True)
            if self.directory.exists():
                self.directory.rename(self._old)
            self._new.rename(self.directory)
            sync_directory(self.directory.parent)
        except OSError as error:
            raise DatabaseError(f"{self.directory}: cannot be written: {error}") from error
        shutil.rmtree(self._old, ignore_errors=True)

    def remove(self) -> None:
        """Remove the state: the database is finished.  An interruption leaves one that is whole, or
        none."""
        directories = self._old, self._new, self.directory
        for directory in directories:
            with suppress(OSError):
                (directory / PROGRESS_NAME).unlink()
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
