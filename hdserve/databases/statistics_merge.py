"""Merging statistics databases of one tokenizer: bounded in memory, resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hdserve.config import StrictModel
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_job import StatisticsJob
from hdserve.databases.table_merge import find_count_shifts
from hdserve.errors import DatabaseError


class MergeProgress(StrictModel):
    """How far an unfinished merge has come.

    Attributes:
        sources: checksums of the databases, in the order in which they are merged.
        max_bytes: limit of the table.
        num_merged: how many of them are merged.
    """

    sources: tuple[int, ...]
    max_bytes: int
    num_merged: int


class StatisticsMerge(StatisticsJob[MergeProgress]):
    """One database with the counts of several.

    Args:
        directory: where it is written.
        sources: databases, merged in order.
        max_bytes: limit of the table.
        checkpoint_s: after a source the state is saved if the last save is at least this many
            seconds ago; a save takes about as long as merging a source of that size.
        on_progress: called after each source.

    Raises:
        DatabaseError: a source cannot be read, they have different tokenizers, or as for
            :class:`StatisticsJob`.
    """

    kind, counted = "merge", "num_merged"

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
        self._databases = [StatisticsDatabase.open(source) for source in sources]
        self._checkpoint_s = checkpoint_s
        self._on_progress = on_progress
        first = self._databases[0].info
        vocab_size = max(database.info.vocab_size for database in self._databases)
        builder = StatisticsBuilder(first.tokenizer, vocab_size, max_bytes=max_bytes)
        checksums = tuple(database.info.crc32 for database in self._databases)
        begun = MergeProgress(sources=checksums, max_bytes=max_bytes, num_merged=0)
        super().__init__(directory, builder, begun)

    def _count_all(self) -> None:
        count_shifts = find_count_shifts(self._databases)
        saved_s = time.monotonic()
        for number, database in enumerate(self._databases, 1):
            if number > self.num_resumed:
                database.verify()
                self._builder.merge(database, count_shifts)
                is_last = number == len(self._databases)
                if not is_last and time.monotonic() - saved_s >= self._checkpoint_s:
                    self._save(number)
                    saved_s = time.monotonic()
            self._on_progress()
