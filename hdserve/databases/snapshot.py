"""The wire and file form of database state: msgpack in a checked envelope, never pickle.

    envelope = msgpack map
        magic        "hdserve"
        version      of this format; another one is refused
        kind         what the payload is: "publish", "reply", "chunk", ...
        model        whose output it is
        fingerprint  of the tokenizer, without which token ids mean nothing
        checksum     BLAKE2b-128 over all other fields
        payload      msgpack; a numpy array is an extension: dtype code, shape, raw little-endian

Messages between replicas and actors and files on disk have the same form, so a file can be sent
and a message kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from hdserve.errors import SnapshotError

MAGIC = "hdserve"
FORMAT_VERSION = 1
MAX_MESSAGE_BYTES = 8 * 2**20
MAX_FILE_BYTES = 64 * 2**20

_ARRAY_EXTENSION = 1
_MAX_DIMENSIONS = 8
_VECTOR_START = 10
"""Where the items of a packed array of one dimension begin."""

_MAX_ITEMS = 2**14
"""Most items of one msgpack list or map: long lists of numbers are sent as arrays."""

_DTYPE_CODES = ("|b1", "|u1", "<u2", "<u4", "<u8", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")
_DTYPES = tuple(np.dtype(code) for code in _DTYPE_CODES)
_ENVELOPE_FIELDS = {
    "magic": str,
    "version": int,
    "kind": str,
    "model": str,
    "fingerprint": str,
    "checksum": bytes,
    "payload": bytes,
}


@dataclass(frozen=True, slots=True)
class DatabaseKey:
    """Which database: generated text belongs to one model and one tokenizer.

    Attributes:
        model: the served model's name.
        fingerprint: a hash of the tokenizer, equal exactly if token ids mean the same.
    """

    model: str
    fingerprint: str


def pack(value: Any) -> bytes:
    """Encode nested dicts, lists, strings, bytes, numbers and numpy arrays as msgpack.

    Raises:
        TypeError: ``value`` holds an object of another type.
    """
    packed: bytes = msgpack.packb(value, default=_pack_array)
    return packed


def unpack(data: bytes) -> Any:
    """The value that ``pack`` encoded; lists stay lists, arrays are read-only views of ``data``.

    Raises:
        SnapshotError: ``data`` was not made by ``pack``, or claims impossible sizes.
    """
    return _unpack(data, max_items=_MAX_ITEMS, max_ext_len=len(data))


def unpack_lightly(data: bytes) -> Any:
    """As :func:`unpack`, with arrays left packed for :func:`join_vectors`."""
    return _unpack(data, max_items=_MAX_ITEMS, max_ext_len=len(data), unpack_array=_left_packed)


def join_vectors(
    packed: Iterable[Any], *dtypes: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The items of one-dimensional arrays of these types, and how many each array has.

    Raises:
        SnapshotError: one of them is something else.
    """
    heads = {bytes((_DTYPES.index(dtype), 1)): dtype for dtype in dtypes}
    parts = [
        each[1] if type(each) is tuple and each[0] == _ARRAY_EXTENSION else b"" for each in packed
    ]
    if not all(part[:2] in heads and len(part) >= _VECTOR_START for part in parts):
        raise SnapshotError("corrupt: an array is missing or has another type")
    numbers = np.frombuffer(b"".join([part[2:_VECTOR_START] for part in parts]), "<i8")
    num_bytes = np.array([len(part) - _VECTOR_START for part in parts], np.int64)
    item_bytes = np.array([heads[part[:2]].itemsize for part in parts], np.int64)
    if (num_bytes % item_bytes).any() or not np.array_equal(numbers, num_bytes // item_bytes):
        raise SnapshotError("corrupt: an array's shape does not match its size")
    runs = groupby(parts, key=lambda part: heads[part[:2]])
    joined = [(b"".join([part[_VECTOR_START:] for part in run]), dtype) for dtype, run in runs]
    empty = np.empty(0, dtypes[0])
    return np.concatenate([empty, *(np.frombuffer(*run) for run in joined)]), numbers


def encode(payload: Any, *, kind: str, key: DatabaseKey) -> bytes:
    """Put ``payload`` into an envelope."""
    body = pack(payload)
    fields = {
        "magic": MAGIC,
        "version": FORMAT_VERSION,
        "kind": kind,
        "model": key.model,
        "fingerprint": key.fingerprint,
        "payload": body,
    }
    packed: bytes = msgpack.packb({**fields, "checksum": _checksum(fields)})
    return packed


def decode(
    data: bytes,
    *,
    kind: str,
    fingerprint: str,
    model: str | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> Any:
    """Open an envelope and return its payload.

    Args:
        model: whose it must be; ``None`` accepts any model with this tokenizer.
        max_bytes: longer ``data`` is refused before it is read.

    Raises:
        SnapshotError: truncated, corrupt, too large, of another version, kind, model or tokenizer;
            the message says which.
    """
    if len(data) > max_bytes:
        raise SnapshotError(f"{len(data)} bytes are more than the {max_bytes} allowed")
    fields = _open_envelope(data)
    if fields["kind"] != kind:
        raise SnapshotError(f"this is a {fields['kind'][:64]!r}, not a {kind!r}")
    if fields["fingerprint"] != fingerprint:
        raise SnapshotError(
            f"made with another tokenizer: its fingerprint is {fields['fingerprint'][:64]!r}, "
            f"expected is {fingerprint[:64]!r}"
        )
    if model is not None and fields["model"] != model:
        raise SnapshotError(f"of the model {fields['model'][:256]!r}, not of {model[:256]!r}")
    return unpack(fields["payload"])


def read_key(data: bytes) -> DatabaseKey:
    """The model and the tokenizer that an envelope belongs to.

    Raises:
        SnapshotError: it is truncated, corrupt or of another version.
    """
    fields = _open_envelope(data)
    return DatabaseKey(fields["model"], fields["fingerprint"])


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` atomically: after a crash it holds the old or the new bytes.

    Raises:
        OSError: the disk is full or not writable; ``path`` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=_open_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


class UnreadableFile(SnapshotError):
    """A file that could not be read; what it holds may be intact.

    Attributes:
        path: of the file.
        reason: why.
    """

    def __init__(self, path: Path, reason: OSError) -> None:
        super().__init__(f"cannot read {path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)

    @property
    def is_missing(self) -> bool:
        """Whether there is no such file."""
        return isinstance(self.reason, FileNotFoundError)


def read_file(path: Path, *, kind: str, key: DatabaseKey) -> Any:
    """The payload of the envelope in ``path``, at most ``MAX_FILE_BYTES``.

    Raises:
        UnreadableFile: the file cannot be read.
        SnapshotError: it is not of this kind and database; the message names it and says why.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SnapshotError(f"the file is larger than the {MAX_FILE_BYTES} bytes allowed")
        return decode(
            path.read_bytes(),
            kind=kind,
            fingerprint=key.fingerprint,
            model=key.model,
            max_bytes=MAX_FILE_BYTES,
        )
    except OSError as error:
        raise UnreadableFile(path, error) from error
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error.message}") from error


def of_another_version(version: int) -> str:
    """Why files of another version are not read, and what to do with them."""
    is_newer = version > FORMAT_VERSION
    text = f"format version {version} is {'newer' if is_newer else 'older'} than {FORMAT_VERSION}"
    carry = "export it with the hdserve that wrote it, import the archive with this one"
    what_to_do = "use the hdserve that wrote it" if is_newer else carry
    return f"{text}, which this program reads: {what_to_do}"


def sync_directory(directory: Path) -> None:
    """Make created, renamed and deleted files in ``directory`` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _open_envelope(data: bytes) -> dict[str, Any]:
    fields = _unpack(data, max_items=2 * len(_ENVELOPE_FIELDS), max_ext_len=0)
    if not isinstance(fields, dict) or fields.get("magic") != MAGIC:
        raise SnapshotError("not made by hdserve, or corrupt")
    version = fields.get("version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise SnapshotError(of_another_version(version))
    is_complete = fields.keys() == _ENVELOPE_FIELDS.keys() and all(
        type(fields[name]) is expected for name, expected in _ENVELOPE_FIELDS.items()
    )
    if not is_complete or fields.pop("checksum") != _checksum(fields):
        raise SnapshotError("corrupt: the checksum does not match")
    return fields


def _checksum(fields: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    names = ("magic", "version", "kind", "model", "fingerprint")
    digest.update(msgpack.packb([fields[name] for name in names]))
    digest.update(fields["payload"])
    return digest.digest()


def _unpack(
    data: bytes,
    *,
    max_items: int,
    max_ext_len: int,
    unpack_array: Callable[[int, bytes], Any] | None = None,
) -> Any:
    try:
        return msgpack.unpackb(
            data,
            ext_hook=unpack_array or _unpack_array,
            max_array_len=max_items,
            max_map_len=max_items,
            max_ext_len=max_ext_len,
        )
    except SnapshotError:
        raise
    except Exception as error:  # msgpack raises a dozen types for malformed input
        raise SnapshotError(f"truncated or corrupt: {error}") from error


def _pack_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot pack a {type(value).__name__}")
    array = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    if array.dtype not in _DTYPES or value.ndim > _MAX_DIMENSIONS:
        raise TypeError(f"cannot pack an array of {value.dtype} with {value.ndim} dimensions")
    head = struct.pack(f"<BB{value.ndim}Q", _DTYPES.index(array.dtype), value.ndim, *value.shape)
    return msgpack.ExtType(_ARRAY_EXTENSION, head + array.tobytes())


def _left_packed(code: int, data: bytes) -> tuple[int, bytes]:
    return code, data


def _unpack_array(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if code != _ARRAY_EXTENSION or len(data) < 2:
        raise SnapshotError(f"unknown extension {code}")
    dtype_code, num_dimensions = data[0], data[1]
    start = 2 + 8 * num_dimensions
    if dtype_code >= len(_DTYPES) or num_dimensions > _MAX_DIMENSIONS or len(data) < start:
        raise SnapshotError("corrupt: an array has no valid head")
    shape = struct.unpack_from(f"<{num_dimensions}Q", data, 2)
    dtype = _DTYPES[dtype_code]
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise SnapshotError("corrupt: an array's shape does not match its size")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)
