"""Merging statistics databases of one tokenizer: bounded in memory, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hdserve.config import StrictModel
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder, check_writable
from hdserve.databases.statistics_checkpoint import Checkpoint
from hdserve.databases.statistics_info import StatisticsInfo
from hdserve.databases.target_lock import TargetLock
from hdserve.errors import DatabaseError


class MergeProgress(StrictModel):
    """How far an unfinished merge has come.

    Attributes:
        sources: checksums of the databases, in the order in which they are merged.
        max_bytes: bound of the table.
        num_merged: how many of them it holds.
    """

    sources: tuple[int, ...]
    max_bytes: int
    num_merged: int


class StatisticsMerge:
    """One database with the counts of several.

    It appears whole at the end; interrupted before it, only the unfinished state was written.  No
    other job may write there until it has run.

    Args:
        directory: where it is written.
        sources: databases, merged in order.
        max_bytes: bound of the table.
        checkpoint_s: the state is saved after a source when so long ago nothing was; a save takes
            about as long as merging a source of that size.
        on_progress: told of each source that was merged.

    Attributes:
        num_resumed: sources that an interrupted merge had merged already.

    Raises:
        DatabaseError: a source cannot be read, or they are of different tokenizers, or the
            unfinished merge in ``directory`` is of other sources or settings, or another job writes
            there.
    """

    def __init__(
        self,
        directory: Path,
        sources: Sequence[Path],
        *,
        max_bytes: int = 512 << 20,
        checkpoint_s: float = 30.0,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        if not sources:
            raise DatabaseError("there is nothing to merge")
        if any(source.resolve() == directory.resolve() for source in sources):
            raise DatabaseError(f"{directory}: is a source and cannot be the target as well")
        self._directory = directory
        self._databases = [StatisticsDatabase.open(source) for source in sources]
        self._max_bytes = max_bytes
        self._checkpoint_s = checkpoint_s
        self._on_progress = on_progress
        first = self._databases[0].info
        vocab_size = max(database.info.vocab_size for database in self._databases)
        self._builder = StatisticsBuilder(first.tokenizer, vocab_size, max_bytes=max_bytes)
        self._checkpoint = Checkpoint(directory, MergeProgress)
        self._lock = TargetLock(directory)
        try:
            self.num_resumed = self._resume()
        except BaseException:
            self._lock.release()
            raise

    def _progress(self, num_merged: int) -> MergeProgress:
        sources = tuple(database.info.crc32 for database in self._databases)
        return MergeProgress(sources=sources, max_bytes=self._max_bytes, num_merged=num_merged)

    def _resume(self) -> int:
        saved = self._checkpoint.load()
        if saved is None:
            return 0
        progress, database = saved
        if progress != self._progress(progress.num_merged):
            raise DatabaseError(
                f"{self._checkpoint.directory}: an unfinished merge of other sources or settings; "
                "finish or delete it"
            )
        self._builder.restore(database)
        return progress.num_merged

    def run(self) -> StatisticsInfo:
        """Merge everything and write the database.

        Raises:
            DatabaseError: sources are of different tokenizers, one is not what was
                written, or nothing can be written.
        """
        try:
            return self._run()
        finally:
            self._lock.release()

    def _run(self) -> StatisticsInfo:
        check_writable(self._directory)
        saved_s = time.monotonic()
        for number, database in enumerate(self._databases, 1):
            if number > self.num_resumed:
                database.verify()
                self._builder.merge(database)
                is_last = number == len(self._databases)
                if not is_last and time.monotonic() - saved_s >= self._checkpoint_s:
                    self._checkpoint.save(self._builder, self._progress(number))
                    saved_s = time.monotonic()
            self._on_progress()
        info = self._builder.write(self._directory)
        self._checkpoint.remove()
        return info
