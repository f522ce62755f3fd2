"""Keeps two jobs from writing one statistics database at a time."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout

from hdserve.databases.statistics_info import CHECKPOINT_NAME
from hdserve.errors import DatabaseError

LOCK_NAME = f"{CHECKPOINT_NAME}.lock"


class TargetLock:
    """Held from its creation until it is released, or its process ends.

    Args:
        directory: to be written; it is created, and removed again if nothing was written.

    Raises:
        DatabaseError: another job holds it, or nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._lock = FileLock(self._path, thread_local=False)
        self._made = list(
            takewhile(lambda each: not each.exists(), (directory, *directory.parents))
        )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
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
