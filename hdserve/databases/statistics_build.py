"""Building a statistics database from files: streamed, bounded in memory, resumable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hdserve.config import StrictModel
from hdserve.databases.corpus import CorpusSegment, read_segments
from hdserve.databases.statistics import ends_crc32
from hdserve.databases.statistics_builder import StatisticsBuilder, check_writable
from hdserve.databases.statistics_checkpoint import Checkpoint
from hdserve.databases.statistics_info import StatisticsInfo
from hdserve.databases.target_lock import TargetLock
from hdserve.errors import DatabaseError

BATCH_SEGMENTS = 256
BATCH_LENGTH = 1 << 22
"""Characters, or tokens, after which a batch has no more segments."""


class CorpusTokenizer(Protocol):
    """What a build needs of a tokenizer."""

    @property
    def fingerprint(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens added."""
        ...


class BuildProgress(StrictModel):
    """How far an unfinished build has come.

    Attributes:
        files: name, size in bytes and checksum of the ends of each corpus in order, to tell
            whether they are the same.
        turn_end, excluded_sources, max_bytes: as the build was told.
        num_segments: segments read so far, over all files in order.
    """

    files: tuple[tuple[str, int, int], ...]
    turn_end: tuple[int, ...]
    excluded_sources: tuple[str, ...]
    max_bytes: int
    num_segments: int


class StatisticsBuild:
    """One build of a directory, which no other job may write until it has run.

    Args:
        directory: where the database is written; the unfinished state lies in ``unfinished/``
            below it.
        paths: corpora, see :mod:`hdserve.databases.corpus`; counted in order.
        turn_end: token ids that end a message of the assistant.
        excluded_sources: beginnings of the sources of rows that are left out.
        checkpoint_tokens: the state is saved whenever so many more tokens were counted.
        on_progress: called with (path, bytes read of it, tokens so far).

    Attributes:
        num_resumed_segments: segments that an interrupted build had read already.
        num_excluded: segments left out, by source.

    Raises:
        DatabaseError: a file is missing or empty, the unfinished build in ``directory`` is of
            other files or settings, or another job writes there.
    """

    def __init__(
        self,
        directory: Path,
        paths: Sequence[Path],
        tokenizer: CorpusTokenizer,
        vocab_size: int,
        *,
        turn_end: Sequence[int] = (),
        excluded_sources: Sequence[str] = (),
        max_bytes: int = 512 << 20,
        checkpoint_tokens: int = 50_000_000,
        on_progress: Callable[[Path, int, int], None] | None = None,
    ) -> None:
        self._directory = directory
        self._paths = tuple(paths)
        self._tokenizer = tokenizer
        self._turn_end = list(turn_end)
        self._excluded_sources = tuple(excluded_sources)
        self._max_bytes = max_bytes
        self._checkpoint_tokens = checkpoint_tokens
        self._on_progress = on_progress
        self._checkpoint = Checkpoint(directory, BuildProgress)
        self._builder = StatisticsBuilder(tokenizer.fingerprint, vocab_size, max_bytes=max_bytes)
        try:
            self._files = tuple((str(path), *_size_and_checksum(path)) for path in paths)
        except OSError as error:
            raise DatabaseError(f"cannot be read: {error}") from error
        self.num_excluded: Counter[str] = Counter()
        self._lock = TargetLock(directory)
        try:
            self.num_resumed_segments = self._resume()
        except BaseException:
            self._lock.release()
            raise

    def _progress(self, num_segments: int) -> BuildProgress:
        return BuildProgress(
            files=self._files,
            turn_end=tuple(self._turn_end),
            excluded_sources=self._excluded_sources,
            max_bytes=self._max_bytes,
            num_segments=num_segments,
        )

    def _resume(self) -> int:
        saved = self._checkpoint.load()
        if saved is None:
            return 0
        progress, database = saved
        if progress != self._progress(progress.num_segments):
            raise DatabaseError(
                f"{self._checkpoint.directory}: an unfinished build of other files or settings; "
                "finish or delete it"
            )
        self._builder.restore(database)
        return progress.num_segments

    def run(self) -> StatisticsInfo:
        """Count everything and write the database.

        Raises:
            DatabaseError: a corpus cannot be read, or nothing can be written.
        """
        try:
            return self._run()
        finally:
            self._lock.release()

    def _run(self) -> StatisticsInfo:
        check_writable(self._directory)
        num_segments = 0
        next_checkpoint = self._builder.num_tokens + self._checkpoint_tokens
        for path in self._paths:
            for batch in _batches(read_segments(path)):
                num_segments += len(batch)
                kept = self._without_excluded(batch)
                is_new = num_segments > self.num_resumed_segments
                if is_new:
                    self._count(path.name, kept)
                if self._on_progress:
                    self._on_progress(path, batch[-1].position, self._builder.num_tokens)
                if is_new and self._builder.num_tokens >= next_checkpoint:
                    next_checkpoint = self._builder.num_tokens + self._checkpoint_tokens
                    self._checkpoint.save(self._builder, self._progress(num_segments))
        info = self._builder.write(self._directory)
        self._checkpoint.remove()
        return info

    def _without_excluded(self, batch: Sequence[CorpusSegment]) -> list[CorpusSegment]:
        kept = []
        for segment in batch:
            if segment.source and segment.source.startswith(self._excluded_sources):
                self.num_excluded[segment.source] += 1
            else:
                kept.append(segment)
        return kept

    def _count(self, corpus: str, batch: Sequence[CorpusSegment]) -> None:
        texts = [segment.content for segment in batch if isinstance(segment.content, str)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        for segment in batch:
            content = segment.content
            token_ids = next(encoded) if isinstance(content, str) else content
            self._builder.add(
                segment.source or corpus,
                token_ids + self._turn_end * segment.is_turn,
                licence=segment.licence,
            )


def _size_and_checksum(path: Path) -> tuple[int, int]:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        return num_bytes, ends_crc32(file.fileno(), num_bytes)


def _batches(segments: Iterable[CorpusSegment]) -> Iterator[list[CorpusSegment]]:
    batch: list[CorpusSegment] = []
    length = 0
    for segment in segments:
        batch.append(segment)
        length += len(segment.content)
        if len(batch) == BATCH_SEGMENTS or length >= BATCH_LENGTH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
