"""A statistics database as a directory of files: names, sizes, checksums, and a description."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from hdserve.databases.statistics_info import (
    INFO_NAME,
    MAX_INFO_BYTES,
    TABLE_NAME,
    TABLE_NAMES,
    is_unfinished,
)
from hdserve.errors import DatabaseError


@dataclass(frozen=True, slots=True)
class StatisticsFiles:
    """One statistics database.

    Attributes:
        database_id: a hash of the tokenizer, the description and the files' names and sizes; equal
            for copies on different nodes.
        fingerprint: of the tokenizer.
        directory: where it is on the actor's node.
        sizes: bytes of each file, by path relative to the directory.
    """

    database_id: str
    fingerprint: str
    directory: str
    sizes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        return sum(self.sizes.values())

    def is_in(self, directory: Path) -> bool:
        """Whether ``directory`` on this node is this database."""
        try:
            return describe(directory).database_id == self.database_id
        except DatabaseError:
            return False


def describe(directory: Path) -> StatisticsFiles:
    """The database in ``directory``; reads only its description.

    Raises:
        DatabaseError: it is not a statistics database.
    """
    try:
        info_path = directory / INFO_NAME
        if info_path.stat().st_size > MAX_INFO_BYTES:
            raise DatabaseError(f"{info_path} is larger than {MAX_INFO_BYTES} bytes")
        description = info_path.read_bytes()
        info = json.loads(description)
        if not isinstance(info, dict):
            raise DatabaseError(f"{info_path} does not describe a statistics database")
        table = info.get("table", TABLE_NAME)
        sizes = {
            path.relative_to(directory).as_posix(): path.stat().st_size
            for path in sorted(directory.rglob("*"))
            if path.is_file() and _is_part(path.relative_to(directory), table)
        }
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{directory} is not a statistics database: {error}") from error
    fingerprint = str(info.get("tokenizer"))
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([fingerprint, sizes]).encode())
    digest.update(description)
    return StatisticsFiles(digest.hexdigest(), fingerprint, str(directory), sizes)


def describe_for(fingerprint: str, directory: Path) -> StatisticsFiles:
    """The database in ``directory``, which must be of the tokenizer with ``fingerprint``.

    Raises:
        DatabaseError: it is not a statistics database, or one of another tokenizer.
    """
    database = describe(directory.absolute())
    if database.fingerprint != fingerprint:
        raise DatabaseError(f"{directory} was made for another tokenizer")
    return database


def _is_part(path: Path, table: str) -> bool:
    """Whether a file belongs to the database whose table is ``table``, and not to the next one
    being built there, or to the one that it has replaced."""
    is_other_table = str(path) in TABLE_NAMES and str(path) != table
    return not (is_unfinished(path) or path.name.startswith(".") or is_other_table)


def file_checksum(path: Path) -> str:
    """BLAKE2b-128 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
