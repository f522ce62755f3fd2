"""A file that only grows: framed, checksummed records, each complete or absent after a crash.

record = length (uint32) | CRC-32 of the body (uint32) | body, at least one byte

Zeros, which a power failure may leave at the end of a file, are not a record.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hdserve.databases.snapshot import UnreadableFile
from hdserve.errors import SnapshotError

MAX_RECORD_BYTES = 16 * 2**20
MAX_OPEN_LOGS = 64
"""The most logs of a database that stay open."""

_FRAME = struct.Struct("<II")


class _CorruptRecord(SnapshotError):
    """A record is not intact."""


@dataclass(frozen=True, slots=True)
class Records:
    """The content of a log.

    Attributes:
        bodies: the records up to the end, or up to the first that is not intact.
        is_torn: the last record was cut short, as a crash during a write leaves it.
        error: why the rest is not usable, when a record in the middle is corrupt.
    """

    bodies: list[bytes]
    is_torn: bool = False
    error: str = ""


class AppendLog:
    """One log file.

    A record is handed to the operating system at once, so it survives the end of the process;
    it survives a power failure after ``sync``.  No descriptor stays open between calls.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, body: bytes) -> None:
        """Write one record.

        Raises:
            OSError: the disk is full or not writable; the file is as before, or not there.
        """
        descriptor = _open(self.path, creates=True)
        try:
            _append(descriptor, self.path, body)
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Wait until all records are on the disk itself."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class OpenLogs:
    """Log files that stay open from their first record until they are closed, ``MAX_OPEN_LOGS`` at
    most; others are opened for each record.

    On network storage opening and closing a file are requests to its server, and closing one waits
    for the server's disk.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def append(self, path: Path, body: bytes, *, creates: bool = False) -> None:
        """Write one record.

        Raises:
            OSError: as :meth:`AppendLog.append`; or there is no such file, and none is created.
        """
        descriptor = self._descriptors.pop(path, None)
        if descriptor is None:
            descriptor = _open(path, creates=creates)
        try:
            _append(descriptor, path, body)
            if len(self._descriptors) < MAX_OPEN_LOGS:
                self._descriptors[path] = descriptor
        finally:
            if path not in self._descriptors:
                os.close(descriptor)

    def close(self, path: Path) -> None:
        """Close a log, as is to be done before it is deleted; nothing if it is not open.

        Raises:
            OSError: some of its records may be lost.
        """
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        for path in list(self._descriptors):
            with contextlib.suppress(OSError):
                self.close(path)


def pack_record(body: bytes) -> bytes:
    """One framed record."""
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def take_record(data: bytes | bytearray, position: int = 0) -> tuple[bytes, int] | None:
    """The record that begins at ``position``, and where it ends; ``None`` if it is not complete
    yet.

    Raises:
        SnapshotError: it is corrupt.
    """
    start = position + _FRAME.size
    if len(data) < start:
        return None
    length, checksum = _unpack_frame(data, position, at=position)
    end = start + length
    if len(data) < end:
        return None
    body = _checked(bytes(data[start:end]), checksum, at=position)
    return body, end


def read_records(path: Path, max_bytes: int) -> Records:
    """Every intact record of the log at ``path``.

    Raises:
        UnreadableFile: the file cannot be read.
        SnapshotError: it is larger than ``max_bytes``.
    """
    bodies: list[bytes] = []
    try:
        with _opened(path, max_bytes) as file:
            for body in _bodies(file):
                if body is None:
                    return Records(bodies, is_torn=True)
                bodies.append(body)
    except _CorruptRecord as error:
        return Records(bodies, error=error.message)
    return Records(bodies)


def iter_records(path: Path) -> Iterator[bytes]:
    """The records of a log of any size that is complete, with one at a time in memory.

    Raises:
        UnreadableFile: the file cannot be read.
        SnapshotError: it is corrupt or cut off.
    """
    try:
        with _opened(path) as file:
            for body in _bodies(file):
                if body is None:
                    raise SnapshotError(f"{path}: truncated or corrupt: it ends early")
                yield body
    except _CorruptRecord as error:
        raise SnapshotError(f"{path}: truncated or corrupt: {error.message}") from error


@contextmanager
def _opened(path: Path, max_bytes: int | None = None) -> Iterator[IO[bytes]]:
    """
    Raises:
        UnreadableFile: the file cannot be read.
        SnapshotError: it is larger than ``max_bytes``.
    """
    try:
        with path.open("rb") as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                raise SnapshotError(
                    f"{path}: the file is larger than the {max_bytes} bytes allowed"
                )
            yield file
    except OSError as error:
        raise UnreadableFile(path, error) from error


def _bodies(file: IO[bytes]) -> Iterator[bytes | None]:
    """The records from here on; the last is ``None`` if it is cut off.

    Raises:
        _CorruptRecord: one is not intact.
    """
    position = 0
    while frame := file.read(_FRAME.size):
        if len(frame) < _FRAME.size:
            yield None
            return
        length, checksum = _unpack_frame(frame, 0, at=position)
        body = file.read(length)
        if len(body) < length:
            _check_length(body, checksum, at=position)
            yield None
            return
        yield _checked(body, checksum, at=position)
        position += _FRAME.size + length


def _unpack_frame(data: bytes | bytearray, start: int, at: int) -> tuple[int, int]:
    """Length and checksum of the body; ``at`` is the record's position, for the error message."""
    length, checksum = _FRAME.unpack_from(data, start)
    if not 0 < length <= MAX_RECORD_BYTES:
        raise _CorruptRecord(f"corrupt at byte {at}: impossible length {length}")
    return length, checksum


def _checked(body: bytes, checksum: int, at: int) -> bytes:
    if zlib.crc32(body) != checksum:
        raise _CorruptRecord(f"corrupt at byte {at}: the checksum is wrong")
    return body


def _check_length(rest: bytes, checksum: int, at: int) -> None:
    """Tell a damaged length from a record that was cut off at the end of the file.

    Raises:
        _CorruptRecord: the body is there, and shorter than the length says.
    """
    found = 0
    for index in range(len(rest)):
        found = zlib.crc32(rest[index : index + 1], found)
        if found == checksum:
            raise _CorruptRecord(f"corrupt at byte {at}: the length is wrong")


def _open(path: Path, *, creates: bool) -> int:
    flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT if creates else 0)
    return os.open(path, flags, 0o600)


def _append(descriptor: int, path: Path, body: bytes) -> None:
    """
    Raises:
        OSError: the file is as before, or not there.
    """
    size = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, pack_record(body))
    except OSError:
        os.ftruncate(descriptor, size)
        if not size:
            path.unlink(missing_ok=True)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
