"""The unfinished state of a job that writes a statistics database."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from hdserve.config import StrictModel
from hdserve.databases.statistics import StatisticsBuilder, StatisticsDatabase
from hdserve.errors import DatabaseError, SnapshotError

CHECKPOINT_NAME = "unfinished"
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
        self._path = self.directory / PROGRESS_NAME
        self._progress_model = progress_model

    def load(self) -> tuple[ProgressT, StatisticsDatabase] | None:
        """What was saved last; ``None`` when nothing was.

        Raises:
            DatabaseError: it is corrupt, or of another kind of job.
        """
        if not self._path.is_file():
            return None
        try:
            progress = self._progress_model.model_validate_json(self._path.read_bytes())
            database = StatisticsDatabase.open(self.directory)
            database.verify()
        except (ValidationError, OSError, SnapshotError) as error:
            raise DatabaseError(
                f"{self.directory}: an unfinished build cannot be resumed; delete it: {error}"
            ) from error
        return progress, database

    def save(self, builder: StatisticsBuilder, progress: ProgressT) -> None:
        """Replace what was saved; an interruption meanwhile leaves nothing to go on with."""
        self._path.unlink(missing_ok=True)
        builder.write(self.directory)
        written = self._path.with_suffix(".new")
        written.write_text(progress.model_dump_json(), encoding="utf-8")
        written.replace(self._path)

    def remove(self) -> None:
        """The database is finished."""
        shutil.rmtree(self.directory, ignore_errors=True)
