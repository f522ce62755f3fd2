"""Building a statistics database from files: streamed, bounded in memory, resumable."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hdserve.config import StrictModel
from hdserve.databases.corpus import CorpusSegment, read_segments
from hdserve.databases.statistics import ends_crc32
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_job import StatisticsJob
from hdserve.errors import DatabaseError

BATCH_SEGMENTS = 256
BATCH_LENGTH = 1 << 22
"""Characters, or tokens, after which a batch takes no further segments."""


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
        files: name, size in bytes and checksum of the ends of each corpus in order, to recognise
            whether they have changed.
        turn_end, excluded_sources, max_bytes: as passed to the build.
        num_segments: segments read so far, over all files in order.
    """

    files: tuple[tuple[str, int, int], ...]
    turn_end: tuple[int, ...]
    excluded_sources: tuple[str, ...]
    max_bytes: int
    num_segments: int


class StatisticsBuild(StatisticsJob[BuildProgress]):
    """A database of corpora.

    Args:
        directory: where it is written.
        paths: corpora, see :mod:`hdserve.databases.corpus`; counted in order.
        turn_end: token ids that end a message of the assistant.
        excluded_sources: prefixes of the sources of rows that are left out.
        checkpoint_tokens: the state is saved each time this many more tokens were counted.
        on_progress: called with (path, bytes read of it, tokens so far).

    Attributes:
        num_excluded: segments left out, by source.

    Raises:
        DatabaseError: a file is missing or empty, or is a pipe or a device, or as for
            :class:`StatisticsJob`.
    """

    kind, counted = "build", "num_segments"

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
        self._paths = tuple(paths)
        self._tokenizer = tokenizer
        self._turn_end = list(turn_end)
        self._excluded_sources = tuple(excluded_sources)
        self._checkpoint_tokens = checkpoint_tokens
        self._on_progress = on_progress
        self.num_excluded: Counter[str] = Counter()
        builder = StatisticsBuilder(tokenizer.fingerprint, vocab_size, max_bytes=max_bytes)
        files = tuple((_name_of(path), *_size_and_checksum(path)) for path in paths)
        begun = BuildProgress(
            files=files,
            turn_end=tuple(turn_end),
            excluded_sources=self._excluded_sources,
            max_bytes=max_bytes,
            num_segments=0,
        )
        super().__init__(directory, builder, begun)

    def _count_all(self) -> None:
        num_segments = 0
        next_checkpoint = self._builder.num_tokens + self._checkpoint_tokens
        for path in self._paths:
            for batch in _batches(read_segments(path)):
                num_segments += len(batch)
                kept = self._without_excluded(batch)
                is_new = num_segments > self.num_resumed
                if is_new:
                    self._count(path.name, kept)
                if self._on_progress:
                    self._on_progress(path, batch[-1].position, self._builder.num_tokens)
                if is_new and self._builder.num_tokens >= next_checkpoint:
                    next_checkpoint = self._builder.num_tokens + self._checkpoint_tokens
                    self._save(num_segments)

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


def _name_of(path: Path) -> str:
    """The path as text that can be kept: it may have bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _size_and_checksum(path: Path) -> tuple[int, int]:
    """
    Raises:
        DatabaseError: it cannot be read, or not again when the build is resumed.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DatabaseError(f"{path}: is no file: pipes and devices cannot be read twice")
        with path.open("rb") as file:
            return status.st_size, ends_crc32(file.fileno(), status.st_size)
    except OSError as error:
        raise DatabaseError(f"{path}: cannot be read: {error.strerror}") from error


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
