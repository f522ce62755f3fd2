"""A model's earlier databases: for another number of shards, or another tokenizer.

Nobody drafts from them until the number or the tokenizer is changed back, so forgotten outputs must
be deleted from them too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

from hdserve.databases import snapshot
from hdserve.databases.output_files import database_directory, databases_root, directory_name
from hdserve.databases.snapshot import DatabaseKey
from hdserve.databases.stored import key_of, shard_directories
from hdserve.errors import DatabaseError, DatabaseInUse


def forget_in_former(
    root: Path, key: DatabaseKey, namespace: str, in_use: Iterable[Path] = ()
) -> None:
    """Delete what all databases of a model below ``root``, for any number of shards and any
    tokenizer, have of ``namespace``.

    Args:
        key: the model, and its current tokenizer.
        in_use: directories of databases whose processes have forgotten it themselves.

    Raises:
        DatabaseInUse: another process is writing one of them.
        DatabaseError: one cannot be changed or identified, while the others' data is still
            deleted; or ``root`` cannot be read.
    """
    used, problems = {path.resolve() for path in in_use}, []
    for directory in _alike(root, key):
        if directory.resolve() in used or not (directory / directory_name(namespace)).exists():
            continue
        try:
            if _is_of(directory, key):
                _forget(directory, namespace)
        except DatabaseError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _alike(root: Path, key: DatabaseKey) -> list[Path]:
    """The directories below ``root`` that may, by their names, be databases of the model.

    Raises:
        DatabaseError: a directory cannot be read.
    """
    readable = database_directory(root, key).name.rpartition("-")[0]
    found: list[Path] = []
    for each in map(databases_root, (root, *shard_directories(root))):
        try:
            found += sorted(each.iterdir()) if each.exists() else ()
        except OSError as error:
            raise DatabaseError(f"{each} cannot be read: {error}") from error
    return [path for path in found if path.name.rpartition("-")[0] == readable]


def _is_of(directory: Path, key: DatabaseKey) -> bool:
    """Whether it is a database of the model, for any tokenizer.

    Raises:
        DatabaseError: it cannot be identified.
    """
    is_current = directory.name == database_directory(directory, key).name
    return is_current or key_of(directory / "generation").model == key.model


def _forget(directory: Path, namespace: str) -> None:
    """
    Raises:
        DatabaseInUse: another process is writing there.
        DatabaseError: it cannot be deleted.
    """
    try:
        with FileLock(directory / "lock", fallback_to_soft=False).acquire(timeout=0):
            shutil.rmtree(directory / directory_name(namespace))
            snapshot.sync_directory(directory)
    except Timeout as error:
        raise DatabaseInUse(
            f"namespace {namespace} was forgotten in the current database, but {directory} (from "
            "another number of shards or another tokenizer) is being written by another process; "
            "repeat the request when it has ended (`hdserve database stop`)"
        ) from error
    except OSError as error:
        raise DatabaseError(f"{namespace} cannot be deleted below {directory}: {error}") from error
