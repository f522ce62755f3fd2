"""The envelope and the files: what was written comes back, anything else is refused."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hdserve.databases import snapshot
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import SnapshotError

KEY = DatabaseKey("a-model", "f" * 32)
ROOT = Path(__file__).parents[2]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)
arrays = st.one_of(
    npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    for dtype in ("u1", "i2", "u4", "i8", "f4", "f8", "?")
)
trees = st.recursive(
    scalars | arrays,
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=12,
)


def same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(same(left[key], right[key]) for key in left)
        )
    return type(left) is type(right) and left == right


@pytest.fixture
def envelope() -> bytes:
    payload = {"tokens": np.arange(200, dtype=np.uint32), "name": "x", "blob": b"\0" * 50}
    return snapshot.encode(payload, kind="test", key=KEY)


def open_envelope(data: bytes) -> object:
    return snapshot.decode(data, kind="test", fingerprint=KEY.fingerprint, model=KEY.model)


@given(trees)
def test_what_is_packed_comes_back(value):
    assert same(snapshot.unpack(snapshot.pack(value)), value)


def test_big_endian_and_strided_arrays_come_back_equal():
    swapped = np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2]
    back = snapshot.unpack(snapshot.pack(swapped))
    assert back.dtype == np.dtype("<i4")
    assert np.array_equal(back, swapped)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array(["text"]), np.array([object()])])
def test_other_objects_are_not_packed(value):
    with pytest.raises(TypeError, match="cannot pack"):
        snapshot.pack(value)


def test_every_truncation_is_refused(envelope):
    for length in range(len(envelope)):
        with pytest.raises(SnapshotError):
            open_envelope(envelope[:length])


def test_every_flipped_bit_is_refused(envelope):
    for index in range(len(envelope)):
        for bit in range(8):
            flipped = bytearray(envelope)
            flipped[index] ^= 1 << bit
            with pytest.raises(SnapshotError):
                open_envelope(bytes(flipped))


@given(st.binary(max_size=300))
def test_junk_is_refused(data):
    with pytest.raises(SnapshotError):
        open_envelope(data)


@given(st.binary(max_size=300))
def test_a_junk_payload_raises_nothing_else(data):
    """A valid checksum does not make the payload valid."""
    with contextlib.suppress(SnapshotError):
        snapshot.unpack(data)


def test_nested_claims_of_huge_lists_are_refused_without_making_them():
    claim = b"\xdd\x00\x40\x00\x01"  # a list of 4,194,305 items
    with pytest.raises(SnapshotError):
        snapshot.unpack(claim * 100_000)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (bytes([200, 1]) + (8).to_bytes(8, "little"), "no valid head"),
        (bytes([3, 1]) + (2**62).to_bytes(8, "little"), "does not match its size"),
        (bytes([3, 200]), "no valid head"),
    ],
)
def test_an_array_that_claims_more_than_it_has_is_refused(head, message):
    data = msgpack.packb(msgpack.ExtType(1, head + bytes(8)))
    with pytest.raises(SnapshotError, match=message):
        snapshot.unpack(data)


def test_extensions_of_others_are_refused():
    data = msgpack.packb(msgpack.ExtType(2, bytes([3, 1, 1]) + bytes(15)))
    with pytest.raises(SnapshotError, match="unknown extension 2"):
        snapshot.unpack(data)


def test_each_refusal_says_why(envelope):
    cases = [
        ({"kind": "other"}, "this is a 'test', not a 'other'"),
        ({"fingerprint": "0" * 32}, "another tokenizer"),
        ({"model": "b-model"}, "of the model 'a-model', not of 'b-model'"),
        ({"max_bytes": 10}, "more than the 10 allowed"),
    ]
    usual = {"kind": "test", "fingerprint": KEY.fingerprint, "model": KEY.model}
    for change, message in cases:
        with pytest.raises(SnapshotError, match=message):
            snapshot.decode(envelope, **{**usual, **change})


def test_a_newer_version_is_named(envelope):
    fields = msgpack.unpackb(envelope)
    fields["version"] = 99
    with pytest.raises(SnapshotError, match="format version 99 is newer than 1"):
        open_envelope(msgpack.packb(fields))


def test_any_model_of_the_tokenizer_can_be_asked_for(envelope):
    payload = snapshot.decode(envelope, kind="test", fingerprint=KEY.fingerprint)
    assert payload["name"] == "x"


def test_a_file_comes_back_and_its_errors_name_it(tmp_path, envelope):
    path = tmp_path / "file"
    snapshot.write_file(path, envelope)
    payload = snapshot.read_file(path, kind="test", key=KEY)
    assert payload["tokens"].tolist() == list(range(200))
    path.write_bytes(envelope[:-1])
    with pytest.raises(SnapshotError, match=rf"{path}: truncated or corrupt"):
        snapshot.read_file(path, kind="test", key=KEY)
    os.truncate(path, snapshot.MAX_FILE_BYTES + 1)
    with pytest.raises(SnapshotError, match="larger than the"):
        snapshot.read_file(path, kind="test", key=KEY)
    with pytest.raises(SnapshotError, match="cannot read"):
        snapshot.read_file(tmp_path / "none", kind="test", key=KEY)


def test_a_crash_between_write_and_rename_leaves_the_old_file(tmp_path):
    """The process ends inside ``write_file``, after the data and before the rename."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = """
import os, sys
from pathlib import Path
from hdserve.databases import snapshot

class Crashing(type(Path())):
    def replace(self, target):
        os._exit(9)

snapshot.write_file(Crashing(sys.argv[1]), b"new" * 1000)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=False)
    assert ended.returncode == 9
    assert path.read_bytes() == b"old"
    left = [name for name in os.listdir(tmp_path) if name != "file"]
    assert [name.startswith(".file.") and name.endswith(".tmp") for name in left] == [True]


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
    """The kernel refuses to let any file of the process grow beyond 1,000 bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = """
import resource, signal, sys
from pathlib import Path
from hdserve.databases import snapshot

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    snapshot.write_file(Path(sys.argv[1]), b"new" * 1000)
except OSError:
    sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=False)
    assert ended.returncode == 7
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_files_are_private(tmp_path: Path, envelope):
    path = tmp_path / "file"
    snapshot.write_file(path, envelope)
    assert path.stat().st_mode & 0o077 == 0
