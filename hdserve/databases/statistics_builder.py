"""Counting the n-grams of texts, and writing them as a statistics database."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hdserve.databases.ngram import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    MAX_STAMP,
    MAX_TOKEN_ID,
    NUM_ADDED,
    ROWS_PER_BUCKET,
    START,
    insert_tokens,
    rebase_stamps,
)
from hdserve.databases.ngram_table import NgramTable
from hdserve.databases.snapshot import sync_directory
from hdserve.databases.statistics import StatisticsDatabase, ends_crc32, file_crc32
from hdserve.databases.statistics_info import (
    FORMAT_VERSION,
    INFO_NAME,
    MAX_CORPORA,
    MAX_NAME_BYTES,
    OTHERS,
    PARTIAL_SUFFIX,
    STATISTICS_ORDERS,
    TABLE_NAME,
    TABLE_NAMES,
    CorpusInfo,
    StatisticsInfo,
    read_info,
    write_info,
)
from hdserve.databases.table_merge import NO_COUNT_SHIFTS, CountShifts, merge_tables
from hdserve.errors import DatabaseError, SnapshotError

_MAGIC = b"hdserve n-gram table\n"
_STAMPS_PER_TURNOVER = 64
"""How many stamps a row ages by while the table's number of contexts is added."""


class StatisticsBuilder:
    """Counts texts into a table of bounded size.

    Args:
        tokenizer: fingerprint of the tokenizer.
        vocab_size: all ids are below it; at most 1,048,576.
        max_bytes: limit of the table; beyond it the rarest contexts are forgotten.

    Raises:
        DatabaseError: the vocabulary is too large.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        *,
        max_bytes: int = 512 << 20,
    ) -> None:
        if not 1 <= vocab_size <= MAX_TOKEN_ID + 1:
            raise DatabaseError(f"a vocabulary of {vocab_size} tokens is not supported")
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.table = NgramTable(max_bytes)
        self.corpora: dict[str, CorpusInfo] = {}
        self._orders = np.array([*STATISTICS_ORDERS, -1], np.int64)
        self._num_stamps_given_up = 0

    @property
    def num_tokens(self) -> int:
        return sum(corpus.num_tokens for corpus in self.corpora.values())

    def add(self, corpus: str, token_ids: Sequence[int], *, licence: str = "") -> None:
        """Count one text; contexts do not reach beyond its first token.

        Args:
            corpus: the name it is listed under, cut if it is long.
            licence: listed with it, cut likewise.

        Raises:
            DatabaseError: an id is outside the vocabulary.
        """
        if not len(token_ids):
            return
        tokens = np.empty(len(token_ids) + 1, np.int64)
        tokens[0] = START
        tokens[1:] = token_ids
        if tokens[1:].min() < 0 or tokens.max() >= self.vocab_size:
            raise DatabaseError(
                f"{corpus}: a token id is outside the vocabulary of {self.vocab_size}"
            )
        self._count(tokens.astype(np.int32))
        licences = (_shortened(licence),) if licence else ()
        name = _shortened(corpus)
        self._list(CorpusInfo(name=name, num_texts=1, num_tokens=len(token_ids), licences=licences))

    def _list(self, corpus: CorpusInfo) -> None:
        """List what was counted; beyond ``MAX_CORPORA`` corpora, in a common entry."""
        is_named = corpus.name in self.corpora or len(self.corpora) < MAX_CORPORA
        name = corpus.name if is_named else OTHERS
        before = self.corpora.get(name)
        self.corpora[name] = (
            before.plus(corpus) if before else corpus.model_copy(update={"name": name})
        )

    def merge(
        self, database: StatisticsDatabase, count_shifts: CountShifts = NO_COUNT_SHIFTS
    ) -> None:
        """Add all counts of another database.

        Args:
            count_shifts: of all databases that are merged, if there are several.

        Raises:
            DatabaseError: it is of another tokenizer.
        """
        if database.info.tokenizer != self.tokenizer:
            raise DatabaseError(f"{database.directory}: cannot be merged, its tokenizer differs")
        self._make_room(database.info.num_contexts)
        merge_tables(
            database.rows,
            database.info.num_buckets,
            *count_shifts,
            self.table.rows,
            self.table.size,
            self._stamp,
        )
        self._rebase()
        for corpus in database.info.corpora:
            self._list(corpus)

    def restore(self, database: StatisticsDatabase) -> None:
        """Continue an unfinished build: take over its table unchanged.

        Raises:
            DatabaseError: it was made with other settings.
        """
        info = database.info
        is_same = (info.tokenizer, info.vocab_size) == (self.tokenizer, self.vocab_size)
        if not is_same or info.num_buckets > self.table.max_buckets:
            raise DatabaseError(f"{database.directory}: was made with other settings")
        while self.table.num_reserved < info.num_buckets:
            self.table.reserve_more()
        self.table.rows[: info.num_buckets * BUCKET_ROWS] = database.rows
        self.table.size[:] = info.num_buckets, info.num_added
        self.corpora = {corpus.name: corpus for corpus in info.corpora}
        self._num_stamps_given_up = self._num_stamps_to_give_up

    def _count(self, tokens: np.typing.NDArray[np.int32]) -> None:
        self._make_room(len(tokens) * len(STATISTICS_ORDERS))
        insert_tokens(
            self.table.rows, self.table.size, tokens, 1, len(tokens), self._orders, self._stamp, 0
        )
        self._rebase()

    @property
    def _stamp(self) -> int:
        return self._num_stamps - self._num_stamps_given_up

    @property
    def _num_stamps(self) -> int:
        """Number of age marks used since the table was empty."""
        interval = max(1, self.table.max_buckets * ROWS_PER_BUCKET // _STAMPS_PER_TURNOVER)
        return 1 + int(self.table.size[NUM_ADDED]) // interval

    @property
    def _num_stamps_to_give_up(self) -> int:
        """How many of the oldest stamps to give up to get below the limit.  It depends only on what
        was counted, so that an interrupted build continues as it would have without the
        interruption."""
        half = MAX_STAMP // 2
        return max(0, self._num_stamps - MAX_STAMP + half) // half * half

    def _rebase(self) -> None:
        """Give up the oldest age marks when there would be too many, so that rows keep ageing."""
        change = self._num_stamps_to_give_up - self._num_stamps_given_up
        if change:
            rebase_stamps(self.table.rows, self.table.num_buckets, change)
            self._num_stamps_given_up += change

    def _make_room(self, num_contexts: int) -> None:
        needed = (int(self.table.size[NUM_ADDED]) + num_contexts) // ROWS_PER_BUCKET + 1
        while self.table.num_reserved < min(needed, self.table.max_buckets):
            self.table.reserve_more()

    def write(self, directory: str | os.PathLike[str]) -> StatisticsInfo:
        """Write the database; an existing one is in place until it is replaced as a whole.

        The old table is kept until the next write: replicas may map it, and on NFS a deleted file
        disappears for them too.

        Raises:
            DatabaseError: nothing was counted, or the directory cannot be written.
        """
        if not self.corpora:
            raise DatabaseError("no text was counted")
        directory = Path(directory)
        partial = directory / f"table{PARTIAL_SUFFIX}"
        partial_info = directory / (INFO_NAME + PARTIAL_SUFFIX)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._write_table(partial)
            info = self._info(partial).model_copy(update={"table": _free_table(directory)})
            write_info(partial_info, info)
            partial.replace(directory / info.table)
            sync_directory(directory)
            partial_info.replace(directory / INFO_NAME)
            sync_directory(directory)
        except OSError as error:
            for left in (partial, partial_info):  # the disk may be full
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise DatabaseError(f"{directory}: cannot be written: {error}") from error
        return info

    def _write_table(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(_MAGIC.ljust(BUCKET_BYTES, b"\0"))
            rows = self.table.rows[: self.table.num_buckets * BUCKET_ROWS]
            file.write(rows.data)  # numpy's `tofile` turns an interruption into a TypeError
            file.flush()
            os.fsync(file.fileno())

    def _info(self, path: Path | None) -> StatisticsInfo:
        """The description of the table at ``path``; without a path the checksums are 0."""
        sample = checksum = 0
        if path is not None:
            with path.open("rb") as file:
                checksum = file_crc32(file.fileno())
                sample = ends_crc32(file.fileno(), path.stat().st_size)
        return StatisticsInfo(
            format_version=FORMAT_VERSION,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            orders=STATISTICS_ORDERS,
            corpora=tuple(self.corpora.values()),
            num_contexts=self.table.count_rows(),
            num_added=int(self.table.size[NUM_ADDED]),
            num_buckets=self.table.num_buckets,
            sample_crc32=sample,
            crc32=checksum,
        )

    def finish(self) -> StatisticsDatabase:
        """The counts as a database in memory, without a file."""
        return StatisticsDatabase(self.table.rows, self._info(None))


def _free_table(directory: Path) -> str:
    """A table name that the database in ``directory`` does not use."""
    try:
        used = read_info(directory).table
    except SnapshotError:
        return TABLE_NAME
    return next(name for name in TABLE_NAMES if name != used)


def _shortened(name: str) -> str:
    return name.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore")
