"""Records that come in pieces are taken whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve.databases.append_log import MAX_RECORD_BYTES, pack_record, read_records, take_record
from hdserve.errors import SnapshotError


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=5), st.integers(1, 20))
def test_records_survive_any_cuts(bodies: list[bytes], size: int) -> None:
    """Whatever the pieces, the records are those that were packed."""
    data = b"".join(map(pack_record, bodies))
    buffer, position, found = bytearray(), 0, []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        while (taken := take_record(buffer, position)) is not None:
            body, position = taken
            found.append(body)
    assert (found, position) == (bodies, len(data))


def test_corrupt_records_are_refused() -> None:
    """A wrong checksum, and lengths no record has, before its bytes have come."""
    record = bytearray(pack_record(b"abc"))
    record[-1] ^= 1
    with pytest.raises(SnapshotError, match="checksum"):
        take_record(bytes(record))
    with pytest.raises(SnapshotError, match="length"):
        take_record((MAX_RECORD_BYTES + 1).to_bytes(4, "little") + bytes(4))
    with pytest.raises(SnapshotError, match="length"):
        take_record(bytes(8))


def test_an_error_says_where_the_corrupt_record_begins(tmp_path: Path) -> None:
    first, second = pack_record(b"first"), bytearray(pack_record(b"second"))
    second[-1] ^= 1
    path = tmp_path / "log"
    path.write_bytes(first + second)
    records = read_records(path, 1000)
    assert records.bodies == [b"first"]
    assert records.error.startswith(f"corrupt at byte {len(first)}:")
