"""The contents of the files of an :class:`~hdserve.databases.output_store.OutputStore`."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdserve.databases import snapshot
from hdserve.databases.append_log import read_records
from hdserve.databases.seen_outputs import OriginRanges, checked_ranges
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import SnapshotError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoredFile:
    """The outputs of one file; ``flaw`` says why some of it could not be used."""

    namespace: str
    segment: Segment
    flaw: str = ""


def database_directory(root: Path, key: DatabaseKey) -> Path:
    """The directory of the database of ``key`` below ``root``; each file format has its own."""
    readable = re.sub(r"[^A-Za-z0-9.-]", "_", key.model)[:48]
    identity = f"{key.model}\0{key.fingerprint}".encode()
    digest = hashlib.blake2b(identity, digest_size=8).hexdigest()
    return databases_root(root) / f"{readable}-{digest}"


def databases_root(root: Path) -> Path:
    """The directory below ``root`` of databases in this version's format."""
    return root / f"v{snapshot.FORMAT_VERSION}"


def left_by_other_versions(root: Path) -> dict[Path, str]:
    """The databases below ``root`` in another version's format, each with what to do with it."""
    found = {}
    paths = root.glob("v*/*/generation") if os.path.isdir(root) else ()
    for path in sorted(paths):
        version = path.parts[-3].removeprefix("v")
        if version.isdecimal() and int(version) != snapshot.FORMAT_VERSION:
            found[path.parent] = snapshot.of_another_version(int(version))
    return found


def directory_name(namespace: str) -> str:
    """The directory of ``namespace``: any string becomes a safe name of fixed length."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()


def versioned_files(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """The logs and chunks among ``paths``, each with its first version."""
    for path in paths:
        if path.suffix in (".log", ".chunk"):
            try:
                yield path, int(path.stem, 16)
            except ValueError:
                logger.warning("%s is not a file of this database", path)


def encode_chunk(namespace: str, segment: Segment, key: DatabaseKey) -> bytes:
    """The content of a chunk's file."""
    payload = {"namespace": namespace, "outputs": segment.to_wire()}
    return snapshot.encode(payload, kind="chunk", key=key)


def read_chunk(path: Path, key: DatabaseKey) -> RestoredFile:
    """The outputs in a chunk.

    Raises:
        SnapshotError: the file cannot be used.
    """
    payload = snapshot.read_file(path, kind="chunk", key=key)
    namespace = _checked_namespace(payload, path)
    try:
        return RestoredFile(namespace, Segment.from_wire(payload.get("outputs")))
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error.message}") from error


def encode_log_head(namespace: str, key: DatabaseKey) -> bytes:
    """The first record of an append log; the others are packed segments."""
    return snapshot.encode({"namespace": namespace}, kind="log", key=key)


class UnbegunLog(SnapshotError):
    """A log whose head was not even written completely."""


def read_log(path: Path, key: DatabaseKey) -> RestoredFile:
    """The outputs in an append log.

    A last record that a crash cut short is left out with a warning; a corrupt record ends the log
    with an error, but what comes before it is used.

    Raises:
        UnbegunLog: a crash cut the head short, so nothing was in it yet.
        SnapshotError: nothing of the file can be used.
    """
    records = read_records(path, snapshot.MAX_FILE_BYTES)
    if not records.bodies and not records.error:
        raise UnbegunLog(f"{path} ends in its head, so there is nothing in it")
    if not records.bodies:
        raise SnapshotError(f"{path}: truncated or corrupt: it has no head")
    try:
        head = snapshot.decode(
            records.bodies[0], kind="log", fingerprint=key.fingerprint, model=key.model
        )
        segment = Segment.from_records(records.bodies[1:])
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error.message}") from error
    if records.is_torn:
        logger.warning("%s ends in an incomplete record, which is left out", path)
    flaw = f"{path}: {records.error}" if records.error else ""
    return RestoredFile(_checked_namespace(head, path), segment, flaw)


@dataclass(frozen=True, slots=True)
class NamespaceState:
    """What is kept of a namespace in addition to its outputs; see :class:`Partition`.

    Attributes:
        chunk_ends: versions where a chunk ended that no other chunk continues.  If another
            opening numbered its outputs after it, nothing else tells that such a chunk was lost.
    """

    flushed_version: int
    calibration: bytes
    evicted: OriginRanges
    chunk_ends: tuple[int, ...] = ()

    def misses(self, places: Sequence[tuple[int, int]]) -> bool:
        """Whether a chunk is missing that was not evicted, as only the oldest chunks are
        evicted.

        Args:
            places: first version and end of each chunk that is there.
        """
        for end in self.chunk_ends:
            older = [stop for start, stop in places if start < end]
            is_there = max(older, default=self.flushed_version) >= end
            if not is_there and (older or not self.evicted):
                return True
        return False


def encode_state(namespace: str, state: NamespaceState, key: DatabaseKey) -> bytes:
    """The content of a state file."""
    payload = {
        "namespace": namespace,
        "flushed_version": state.flushed_version,
        "calibration": state.calibration,
        "evicted": state.evicted,
        "chunk_ends": list(state.chunk_ends),
    }
    return snapshot.encode(payload, kind="state", key=key)


def read_state(path: Path, key: DatabaseKey) -> tuple[str, NamespaceState]:
    """A namespace, and what is kept of it in addition to its outputs.

    Raises:
        SnapshotError: the file cannot be used.
    """
    payload = snapshot.read_file(path, kind="state", key=key)
    namespace = _checked_namespace(payload, path)
    flushed_version, calibration = payload.get("flushed_version"), payload.get("calibration")
    if not isinstance(flushed_version, int) or not isinstance(calibration, bytes):
        raise SnapshotError(f"{path}: corrupt: a field is missing")
    try:
        evicted = checked_ranges(payload.get("evicted"))
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error.message}") from error
    ends = payload.get("chunk_ends", [])
    if not isinstance(ends, list) or not all(isinstance(end, int) for end in ends):
        raise SnapshotError(f"{path}: corrupt: chunk_ends must be a list of integers")
    return namespace, NamespaceState(flushed_version, calibration, evicted, tuple(ends))


def _checked_namespace(head: Any, path: Path) -> str:
    namespace = head.get("namespace") if isinstance(head, dict) else None
    if not isinstance(namespace, str) or directory_name(namespace) != path.parent.name:
        raise SnapshotError(f"{path}: corrupt, or a file of another namespace")
    return namespace
