"""The statistics database: n-grams of a large corpus, immutable, mapped from a file.

A database is a directory of two files::

    info.json     format, tokenizer fingerprint, corpora, sizes, checksums
    table.bin     one bucket of header, then the buckets of an n-gram table

One that replaces another has its table in ``table-2.bin``, and the next in ``table.bin`` again:
``info.json`` names it, and is replaced when the table is on the disk, so that one of them is whole
at any time.

The table is read through a private mapping, so that all processes of a machine share its pages
and opening takes the same time at any size.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from hdserve.config import StrictModel
from hdserve.databases.ngram import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    MAX_STAMP,
    MAX_TOKEN_ID,
    NUM_ADDED,
    ROW_WORDS,
    ROWS_PER_BUCKET,
    START,
    Ints,
    Rows,
    insert_tokens,
    merge_tables,
    new_size,
)
from hdserve.databases.ngram_table import NgramTable
from hdserve.databases.snapshot import sync_directory
from hdserve.databases.unfinished import PARTIAL_SUFFIX
from hdserve.errors import DatabaseError, SnapshotError

FORMAT_VERSION = 1
STATISTICS_ORDERS = (1, 2, 3, 5)
"""Context lengths in tokens, ascending."""

INFO_NAME, TABLE_NAME = "info.json", "table.bin"
TABLE_NAMES = (TABLE_NAME, "table-2.bin")
MAX_CORPORA = 1000
"""Listed by name; what comes after them is listed together, so that ``info.json`` stays small."""

MAX_LICENCES = 8
"""Listed of one corpus."""

OTHERS = "others"
"""The name of all corpora, and of all licences, beyond those."""

_MAX_NAME_BYTES = 128
_MAGIC = b"hdserve n-gram table\n"
_SAMPLE_BYTES = 1 << 20
_STAMPS_PER_TURNOVER = 64
"""By so many stamps the age of a row grows while as many contexts come as the table holds."""


def _bounded(licences: tuple[str, ...]) -> tuple[str, ...]:
    """Each of them once, the first ones by name."""
    found = tuple(dict.fromkeys(licences))
    return found if len(found) <= MAX_LICENCES else (*found[: MAX_LICENCES - 1], OTHERS)


def _shortened(name: str) -> str:
    return name.encode(errors="replace")[:_MAX_NAME_BYTES].decode(errors="ignore")


class CorpusInfo(StrictModel):
    """What one corpus contributed: a file, or what the rows of files name as their source."""

    name: str
    num_texts: int = Field(ge=0)
    num_tokens: int = Field(ge=0)
    licences: tuple[str, ...] = ()
    """As the rows name them."""

    def plus(self, other: CorpusInfo) -> CorpusInfo:
        """Both together, under this name."""
        return CorpusInfo(
            name=self.name,
            num_texts=self.num_texts + other.num_texts,
            num_tokens=self.num_tokens + other.num_tokens,
            licences=_bounded(self.licences + other.licences),
        )


class StatisticsInfo(StrictModel):
    """The content of ``info.json``."""

    format_version: int
    tokenizer: str
    """Fingerprint of the tokenizer whose ids the table holds."""

    vocab_size: int = Field(ge=1)
    orders: tuple[int, ...]
    corpora: tuple[CorpusInfo, ...]
    num_contexts: int = Field(ge=0)
    """Contexts held."""

    num_added: int = Field(ge=0)
    """Contexts that were counted, those forgotten since included."""

    num_buckets: int = Field(ge=1)
    sample_crc32: int
    """Checksum of the first and the last mebibyte of the table, checked on opening."""

    crc32: int
    """Checksum of the whole file, checked by :meth:`StatisticsDatabase.verify`."""

    table: Literal["table.bin", "table-2.bin"] = "table.bin"
    """The file of the table."""

    @property
    def num_tokens(self) -> int:
        return sum(corpus.num_tokens for corpus in self.corpora)


class StatisticsDatabase:
    """A statistics database that is open for reading.

    Attributes:
        rows, size: the n-gram table, see ``ngram``.
        info: what is inside.
    """

    def __init__(self, rows: Rows, info: StatisticsInfo, directory: Path | None = None) -> None:
        self.rows = rows
        self.info = info
        self.directory = directory
        self.size: Ints = new_size(info.num_buckets)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], *, tokenizer: str | None = None
    ) -> StatisticsDatabase:
        """Map the database in ``directory``.

        Args:
            tokenizer: the fingerprint that the database must have been made for.

        Raises:
            SnapshotError: there is no database, or it is corrupt, truncated, newer than this
                version, or made for another tokenizer.
        """
        directory = Path(directory)
        info = read_info(directory)
        if tokenizer is not None and info.tokenizer != tokenizer:
            raise SnapshotError(
                f"{directory}: made for the tokenizer {info.tokenizer[:12]}, "
                f"not for {tokenizer[:12]}"
            )
        path = directory / info.table
        expected = (info.num_buckets + 1) * BUCKET_BYTES
        try:
            found = path.stat().st_size
            if found != expected:
                raise SnapshotError(f"{path}: has {found} bytes, {expected} were written")
            with path.open("rb") as file:
                if ends_crc32(file.fileno(), found) != info.sample_crc32:
                    raise SnapshotError(f"{path}: is corrupt (checksum)")
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be read: {error}") from error
        words = np.frombuffer(mapping, np.uint32)
        return cls(words[BUCKET_BYTES // 4 :].reshape(-1, ROW_WORDS), info, directory)

    @property
    def num_bytes(self) -> int:
        """Size of the table."""
        return self.info.num_buckets * BUCKET_BYTES

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read the whole table and compare its checksum.

        Args:
            progress: told of the bytes read since the last call.

        Raises:
            SnapshotError: the table is not what was written, or cannot be read.
        """
        if self.directory is None:
            return
        path = self.directory / self.info.table
        try:
            found = file_crc32(path, progress)
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be read: {error}") from error
        if found != self.info.crc32:
            raise SnapshotError(f"{path}: is corrupt (checksum)")


class StatisticsBuilder:
    """Counts texts into a table of bounded size.

    Args:
        tokenizer: fingerprint of the tokenizer.
        vocab_size: all ids are below it; at most 1,048,576.
        max_bytes: bound of the table; beyond it the rarest contexts are forgotten.

    Raises:
        DatabaseError: the vocabulary is too large.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        *,
        max_bytes: int = 512 << 20,
        orders: Sequence[int] = STATISTICS_ORDERS,
    ) -> None:
        if not 1 <= vocab_size <= MAX_TOKEN_ID + 1:
            raise DatabaseError(f"a vocabulary of {vocab_size} tokens is not supported")
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.orders = tuple(orders)
        self.table = NgramTable(max_bytes)
        self.corpora: dict[str, CorpusInfo] = {}
        self._orders = np.array([*orders, -1], np.int64)

    @property
    def num_tokens(self) -> int:
        return sum(corpus.num_tokens for corpus in self.corpora.values())

    def add(self, corpus: str, token_ids: Sequence[int], *, licence: str = "") -> None:
        """Count one text; contexts do not reach beyond its first token.

        Args:
            corpus: the name it is listed under, its beginning if it is long.
            licence: listed beside it, likewise.

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
        """Note what was counted, beyond ``MAX_CORPORA`` together with others."""
        is_named = corpus.name in self.corpora or len(self.corpora) < MAX_CORPORA
        name = corpus.name if is_named else OTHERS
        before = self.corpora.get(name)
        self.corpora[name] = (
            before.plus(corpus) if before else corpus.model_copy(update={"name": name})
        )

    def merge(self, database: StatisticsDatabase) -> None:
        """Add all counts of another database.

        Raises:
            DatabaseError: it is of another tokenizer or has other context lengths.
        """
        if database.info.tokenizer != self.tokenizer or database.info.orders != self.orders:
            raise DatabaseError(
                f"{database.directory}: cannot be merged, its tokenizer or context lengths differ"
            )
        self._make_room(database.info.num_contexts)
        merge_tables(
            database.rows, database.info.num_buckets, self.table.rows, self.table.size, self._stamp
        )
        for corpus in database.info.corpora:
            self._list(corpus)

    def restore(self, database: StatisticsDatabase) -> None:
        """Continue an unfinished build: take over its table as it is.

        Raises:
            DatabaseError: it was made with other settings.
        """
        info = database.info
        if (info.tokenizer, info.vocab_size, info.orders) != (
            self.tokenizer,
            self.vocab_size,
            self.orders,
        ) or info.num_buckets > self.table.max_buckets:
            raise DatabaseError(f"{database.directory}: was made with other settings")
        while self.table.num_reserved < info.num_buckets:
            self.table.reserve_more()
        self.table.rows[: info.num_buckets * BUCKET_ROWS] = database.rows
        self.table.size[:] = info.num_buckets, info.num_added
        self.corpora = {corpus.name: corpus for corpus in info.corpora}

    def _count(self, tokens: np.typing.NDArray[np.int32]) -> None:
        self._make_room(len(tokens) * len(self.orders))
        insert_tokens(
            self.table.rows, self.table.size, tokens, 1, len(tokens), self._orders, self._stamp, 0
        )

    @property
    def _stamp(self) -> int:
        interval = max(1, self.table.max_buckets * ROWS_PER_BUCKET // _STAMPS_PER_TURNOVER)
        return min(MAX_STAMP, 1 + int(self.table.size[NUM_ADDED]) // interval)

    def _make_room(self, num_contexts: int) -> None:
        needed = (int(self.table.size[NUM_ADDED]) + num_contexts) // ROWS_PER_BUCKET + 1
        while self.table.num_reserved < min(needed, self.table.max_buckets):
            self.table.reserve_more()

    def write(self, directory: str | os.PathLike[str]) -> StatisticsInfo:
        """Write the database; an existing one is there until it is replaced as a whole.

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
            _write_info(partial_info, info)
            partial.replace(directory / info.table)
            sync_directory(directory)
            partial_info.replace(directory / INFO_NAME)
            sync_directory(directory)
        except OSError as error:
            for left in (partial, partial_info):  # on a full disk
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise DatabaseError(f"{directory}: cannot be written: {error}") from error
        for name in TABLE_NAMES:
            if name != info.table:
                with suppress(OSError):
                    (directory / name).unlink(missing_ok=True)
        return info

    def _write_table(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(_MAGIC.ljust(BUCKET_BYTES, b"\0"))
            self.table.rows[: self.table.num_buckets * BUCKET_ROWS].tofile(file)
            file.flush()
            os.fsync(file.fileno())

    def _info(self, path: Path | None) -> StatisticsInfo:
        """What is written beside the table at ``path``; without one the checksums are 0."""
        sample = checksum = 0
        if path is not None:
            checksum = file_crc32(path)
            with path.open("rb") as file:
                sample = ends_crc32(file.fileno(), path.stat().st_size)
        return StatisticsInfo(
            format_version=FORMAT_VERSION,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            orders=self.orders,
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


def check_writable(directory: Path) -> None:
    """Before a long job, that a database can be written there; makes the directory.

    Raises:
        DatabaseError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise DatabaseError(f"{directory}: cannot be written: {error}") from error


def _free_table(directory: Path) -> str:
    """A name of a table that the database in ``directory`` does not use."""
    try:
        used = read_info(directory).table
    except SnapshotError:
        return TABLE_NAME
    return next(name for name in TABLE_NAMES if name != used)


def _write_info(path: Path, info: StatisticsInfo) -> None:
    """The usual name of the table is left out, as earlier versions know no other."""
    is_usual = info.table == TABLE_NAME
    written = info.model_dump_json(indent=2, exclude={"table"} if is_usual else None)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{written}\n")
        file.flush()
        os.fsync(file.fileno())


def read_info(directory: Path) -> StatisticsInfo:
    """Read and check ``info.json``.

    Raises:
        SnapshotError: it is missing, corrupt or of a newer format.
    """
    path = directory / INFO_NAME
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise SnapshotError(f"{directory}: no statistics database: {error}") from error
    except ValueError as error:
        raise SnapshotError(f"{path}: is corrupt: {error}") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise SnapshotError(f"{path}: has format {version}, newer than {FORMAT_VERSION}")
    try:
        return StatisticsInfo.model_validate(data)
    except ValidationError as error:
        raise SnapshotError(f"{path}: is corrupt: {error.errors()[0]['msg']}") from error


def file_crc32(path: Path, progress: Callable[[int], None] | None = None) -> int:
    """The CRC-32 of a file, read in pieces."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            value = zlib.crc32(piece, value)
            if progress:
                progress(len(piece))
    return value


def ends_crc32(file: int, num_bytes: int) -> int:
    """The CRC-32 of the first and the last mebibyte of a file of ``num_bytes``."""
    value = zlib.crc32(os.pread(file, _SAMPLE_BYTES, 0))
    return zlib.crc32(os.pread(file, _SAMPLE_BYTES, max(0, num_bytes - _SAMPLE_BYTES)), value)
