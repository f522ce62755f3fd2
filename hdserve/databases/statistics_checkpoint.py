"""The unfinished state of a job that writes a statistics database."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from hdserve.config import StrictModel
from hdserve.databases.snapshot import sync_directory, write_file
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.unfinished import CHECKPOINT_NAME
from hdserve.errors import DatabaseError, SnapshotError

PROGRESS_NAME = "progress.json"

ProgressT = TypeVar("ProgressT", bound=StrictModel)


class Checkpoint(Generic[ProgressT]):
    """A database beside the one that will be finished, and how far it has come.

    Args:
        directory: of the database that will be finished; the state lies in ``unfinished/`` below.
        progress_model: what says how far it has come.
    """

    def __init__(self, directory: Path, progress_model: type[ProgressT]) -> None:
        self.directory = directory / CHECKPOINT_NAME
        self._new = directory / f"{CHECKPOINT_NAME}.new"
        self._old = directory / f"{CHECKPOINT_NAME}.old"
        self._progress_model = progress_model

    def load(self) -> tuple[ProgressT, StatisticsDatabase] | None:
        """What was saved last; ``None`` when nothing was.

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
        """Whether anything was saved; puts it in its place, where an interruption kept it from
        there.

        Raises:
            OSError: it cannot be put there.
        """
        for saved in (self.directory, self._new, self._old):
            if (saved / PROGRESS_NAME).is_file():
                if saved != self.directory:
                    shutil.rmtree(self.directory, ignore_errors=True)
                    saved.rename(self.directory)
                return True
        return False

    def save(self, builder: StatisticsBuilder, progress: ProgressT) -> None:
        """Replace what was saved; an interruption meanwhile leaves that, or all of the new.

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
        """The database is finished."""
        for directory in (self.directory, self._new, self._old):
            shutil.rmtree(directory, ignore_errors=True)
