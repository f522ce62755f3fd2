"""A file that only grows: framed, checksummed records, each complete or absent after a crash.

record = length (uint32) | CRC-32 of the body (uint32) | body, at least one byte

Zeros, which a power failure may leave at the end of a file, are no record.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from hdserve.errors import SnapshotError

MAX_RECORD_BYTES = 16 * 2**20

_FRAME = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Records:
    """What a log holds.

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
    it survives a power failure after ``sync``.  No descriptor stays open between calls, so a
    store may have any number of logs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, body: bytes) -> None:
        """Write one record.

        Raises:
            OSError: the disk is full or not writable; the file is as before.
        """
        record = pack_record(body)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, record)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Wait until all records are on the disk itself."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def pack_record(body: bytes) -> bytes:
    """One framed record."""
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def take_record(data: bytes | bytearray, position: int = 0) -> tuple[bytes, int] | None:
    """The record that begins at ``position``, and where it ends; ``None`` as long as it is not
    complete.

    Raises:
        SnapshotError: it is corrupt.
    """
    start = position + _FRAME.size
    if len(data) < start:
        return None
    length, checksum = _FRAME.unpack_from(data, position)
    if not 0 < length <= MAX_RECORD_BYTES:
        raise SnapshotError(f"corrupt at byte {position}: impossible length {length}")
    end = start + length
    if len(data) < end:
        return None
    body = bytes(data[start:end])
    if zlib.crc32(body) != checksum:
        raise SnapshotError(f"corrupt at byte {position}: the checksum is wrong")
    return body, end


def read_records(path: Path, max_bytes: int) -> Records:
    """Every intact record of the log at ``path``.

    Raises:
        SnapshotError: the file cannot be read or is larger than ``max_bytes``.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise SnapshotError(f"{path}: the file is larger than the {max_bytes} bytes allowed")
        data = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error}") from error
    bodies: list[bytes] = []
    position = 0
    while position < len(data):
        try:
            taken = take_record(data, position)
        except SnapshotError as error:
            return Records(bodies, error=error.message)
        if taken is None:
            return Records(bodies, is_torn=True)
        body, position = taken
        bodies.append(body)
    return Records(bodies)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
