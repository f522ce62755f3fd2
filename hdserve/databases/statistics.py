"""The statistics database: n-grams of a large corpus, immutable, mapped from a file.

A database is a directory of two files::

    info.json     format, tokenizer fingerprint, corpora, sizes, checksums
    table.bin     one bucket of header, then the buckets of an n-gram table

A database that replaces another has its table in ``table-2.bin``, the next one in ``table.bin``
again: ``info.json`` names it, and is replaced once the table is on the disk, so that one of them is
complete at any time.  The table that was replaced stays until the next one is written.

The table is read through a private mapping, so that all processes of a machine share its pages and
opening takes the same time at any size.
"""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hdserve.databases.ngram import BUCKET_BYTES, ROW_WORDS, Ints, Rows, new_size
from hdserve.databases.statistics_info import STATISTICS_ORDERS, StatisticsInfo, read_info
from hdserve.errors import SnapshotError

_SAMPLE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 24


class StatisticsDatabase:
    """A statistics database that is open for reading.

    Args:
        file: the file that ``rows`` map; closed with the database.

    Attributes:
        rows, size: the n-gram table, see ``ngram``.
        info: its description.
    """

    def __init__(
        self,
        rows: Rows,
        info: StatisticsInfo,
        directory: Path | None = None,
        file: BinaryIO | None = None,
    ) -> None:
        self.rows = rows
        self.info = info
        self.directory = directory
        self.size: Ints = new_size(info.num_buckets)
        self._file = file
        if file is not None:
            weakref.finalize(self, file.close)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], *, tokenizer: str | None = None
    ) -> StatisticsDatabase:
        """Map the database in ``directory``.

        Args:
            tokenizer: the fingerprint that the database must have been made for.

        Raises:
            SnapshotError: there is no database, or it is corrupt, truncated, of a newer version, or
                made for another tokenizer or for contexts of other lengths.
        """
        directory = Path(directory)
        info = read_info(directory)
        if tokenizer is not None and info.tokenizer != tokenizer:
            raise SnapshotError(
                f"{directory}: made for the tokenizer {info.tokenizer[:12]}, "
                f"not for {tokenizer[:12]}"
            )
        if info.orders != STATISTICS_ORDERS:
            raise SnapshotError(
                f"{directory}: has contexts of {list(info.orders)} tokens, not of "
                f"{list(STATISTICS_ORDERS)}"
            )
        path = directory / info.table
        expected = (info.num_buckets + 1) * BUCKET_BYTES
        try:
            with ExitStack() as stack:
                file = stack.enter_context(path.open("rb"))
                found = os.fstat(file.fileno()).st_size
                if found != expected:
                    raise SnapshotError(f"{path}: has {found} bytes, {expected} were written")
                if ends_crc32(file.fileno(), found) != info.sample_crc32:
                    raise SnapshotError(f"{path}: is corrupt (checksum)")
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                stack.pop_all()
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be read: {error}") from error
        words = np.frombuffer(mapping, np.uint32)
        return cls(words[BUCKET_BYTES // 4 :].reshape(-1, ROW_WORDS), info, directory, file)

    @property
    def num_bytes(self) -> int:
        """Size of the table."""
        return self.info.num_buckets * BUCKET_BYTES

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read the whole table and compare its checksum.  This reads the file that is mapped, even
        if it was replaced since, and not the mapping, where a disk error would end the process.

        Args:
            progress: called with the bytes read since the last call.

        Raises:
            SnapshotError: the table is not what was written, or cannot be read.
        """
        if self._file is None:
            return
        try:
            found = file_crc32(self._file.fileno(), progress)
        except OSError as error:
            raise SnapshotError(f"{self._file.name}: cannot be read: {error}") from error
        if found != self.info.crc32:
            raise SnapshotError(f"{self._file.name}: is corrupt (checksum)")


def file_crc32(file: int, progress: Callable[[int], None] | None = None) -> int:
    """The CRC-32 of a file, read in pieces."""
    value = offset = 0
    while piece := os.pread(file, _PIECE_BYTES, offset):
        value = zlib.crc32(piece, value)
        offset += len(piece)
        if progress:
            progress(len(piece))
    return value


def ends_crc32(file: int, num_bytes: int) -> int:
    """The CRC-32 of the first and the last mebibyte of a file of ``num_bytes``."""
    value = zlib.crc32(os.pread(file, _SAMPLE_BYTES, 0))
    return zlib.crc32(os.pread(file, _SAMPLE_BYTES, max(0, num_bytes - _SAMPLE_BYTES)), value)
