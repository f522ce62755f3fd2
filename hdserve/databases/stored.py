"""Model databases on disk: found, described and read, also while they are in use."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from hdserve.databases import snapshot
from hdserve.databases.database_files import DatabaseFiles
from hdserve.databases.output_files import (
    database_directory,
    databases_root,
    left_by_other_versions,
)
from hdserve.databases.output_log import OutputLog
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import DatabaseError, SnapshotError

UNBOUNDED: Final = 2**62
"""A log size that is never reached, so that everything on disk is read."""

_SHARD_NAMES: Final = "shard-*-of-*"


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """The content of one namespace of a database."""

    name: str
    num_outputs: int
    num_tokens: int
    has_calibration: bool


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """One database on disk."""

    key: DatabaseKey
    directory: Path
    num_refused_files: int
    namespaces: tuple[NamespaceInfo, ...]

    @property
    def num_outputs(self) -> int:
        return sum(item.num_outputs for item in self.namespaces)


def find_databases(root: Path) -> list[DatabaseKey]:
    """The databases below ``root``, a ``snapshot_dir``, in the order of their directories.

    Raises:
        DatabaseError: ``root`` cannot be read, or holds no database; the message names those of
            other versions and the directories of shards.
    """
    files = _generations(root)
    if not files:
        if not os.path.isdir(root):
            raise DatabaseError(f"there is no directory {root.absolute()}")
        left = [f"; {path}: {text}" for path, text in left_by_other_versions(root).items()]
        left += [f"; {path} is one of a shard" for path in shard_directories(root)]
        raise DatabaseError(f"{root} holds no model database{''.join(left)}")
    return [key_of(path) for path in files]


def check_tokenizer(root: Path, key: DatabaseKey) -> None:
    """
    Raises:
        DatabaseError: the databases of this model below ``root`` are of another tokenizer, or
            ``root`` cannot be read.
    """
    keys = []
    for path in _generations(root):
        with contextlib.suppress(DatabaseError):  # a damaged one cannot be identified
            keys.append(key_of(path))
    found = [each for each in keys if each.model == key.model]
    if found and key not in found:
        other = database_directory(root, found[0])
        raise DatabaseError(
            f"{key.model} has the tokenizer {found[0].fingerprint[:16]}, the outputs are of "
            f"{key.fingerprint[:16]}: nobody would draft from them. If the model has another "
            f"tokenizer now, move {other} away"
        )


def shard_directories(root: Path) -> list[Path]:
    """The directories of shards below ``root``: each is the root of one actor's databases.

    Raises:
        DatabaseError: ``root`` cannot be read.
    """
    try:
        return [path for path in _entries(root) if fnmatchcase(path.name, _SHARD_NAMES)]
    except OSError as error:
        raise DatabaseError(f"{root} cannot be read: {error}") from error


def stored_shards(root: Path, key: DatabaseKey) -> list[Path]:
    """The directories of shards that hold a database of ``key``.

    Raises:
        DatabaseError: ``root`` cannot be read.
    """
    try:
        return [path for path in shard_directories(root) if database_directory(path, key).is_dir()]
    except OSError as error:
        raise DatabaseError(f"{root} cannot be read: {error}") from error


def check_unsharded(root: Path, num_shards: int = 1) -> None:
    """
    Args:
        num_shards: of the server that is to read the databases.

    Raises:
        DatabaseError: the databases below ``root`` belong to shards, or will: nobody would read
            what is put next to them.
    """
    advice = "have it import an archive (POST /v1/speculation/databases/MODEL/import)"
    _check_no_shards(root, "reads nothing", advice)
    if num_shards > 1 and not fnmatchcase(root.absolute().name, f"shard-*-of-{num_shards}"):
        raise DatabaseError(
            f"{root} is not where a server with model_database.num_shards: {num_shards} reads: "
            f"{advice}"
        )


def check_current(root: Path) -> None:
    """
    Raises:
        DatabaseError: the databases below ``root`` belong to shards: one next to them is older,
            and no longer grows; or ``root`` is that of a shard, next to shards of another number:
            only those of one number still grow.
    """
    by_server = "have the server do so (GET /v1/speculation/databases/MODEL/export)"
    advice = f"export from these directories, or {by_server}"
    _check_no_shards(root, "writes nothing more", advice)
    shard = root.absolute()
    beside = shard_directories(shard.parent) if fnmatchcase(shard.name, _SHARD_NAMES) else []
    for path in beside:
        if _number_of(path) != _number_of(shard):
            raise DatabaseError(
                f"{root} lies beside {path.name}, and a server writes only to the shards of one "
                f"number: move away those that are not of model_database.num_shards, or {by_server}"
            )


def _number_of(shard: Path) -> str:
    """Of how many ``shard`` is one."""
    return shard.name.rpartition("-")[2]


def _check_no_shards(root: Path, does: str, advice: str) -> None:
    for path in shard_directories(root)[:1]:
        raise DatabaseError(
            f"{root} holds databases of shards ({path.name}); next to them a server {does}: "
            f"{advice}, or move them away if model_database.num_shards is 1 now"
        )


def key_of(generation: Path) -> DatabaseKey:
    """The key of a database, read from ``generation``, or if that is damaged from another file.

    Raises:
        DatabaseError: no file gives it.
    """
    namespaces = generation.parent
    others = [path for name in ("state", "*.chunk") for path in namespaces.glob(f"*/{name}")]
    problem = ""
    for path in (generation, *others):
        try:
            return snapshot.read_key(path.read_bytes())
        except (OSError, SnapshotError) as error:
            problem = problem or str(error)
    raise DatabaseError(f"{generation} cannot be used: {problem}")


def find_database(root: Path, model: str | None, fingerprint: str = "") -> DatabaseKey:
    """The database of ``model``, or the only one there is.

    Args:
        fingerprint: a prefix of its tokenizer's; a model may have had several tokenizers.

    Raises:
        DatabaseError: there is none, or more than one.
    """
    keys = find_databases(root)
    named = [key for key in keys if model in (None, key.model)]
    found = [key for key in named if key.fingerprint.startswith(fingerprint)]
    if len(found) == 1:
        return found[0]
    keys.sort(key=lambda key: (key.model, key.fingerprint))
    known = ", ".join(f"{key.model} (tokenizer {key.fingerprint[:16]})" for key in keys)
    wanted = f" of {model!r}" if model is not None else ""
    wanted += f" with the tokenizer {fingerprint[:64]!r}" if fingerprint else ""
    problem = f"no database{wanted}"
    if found:
        is_one_model = len({key.model for key in found}) == 1
        problem = f"more than one database{wanted}: --{'fingerprint' if is_one_model else 'model'} "
        problem += "says which"
    raise DatabaseError(f"{root}: {problem}; there are: {known}")


def describe(root: Path, key: DatabaseKey) -> DatabaseInfo:
    """The content of a database, which may be in use.

    A namespace that was forgotten keeps a state, for readers that were away meanwhile; it is
    left out.

    Raises:
        DatabaseError: it cannot be read.
    """
    files, log = open_to_read(root, key)
    namespaces = []
    for name in sorted(log.namespaces()):
        partition = log.partition(name)
        if not (partition.num_outputs or partition.calibration):
            continue
        num_tokens = sum(segment.num_tokens for _, segment in partition.segments())
        namespaces.append(
            NamespaceInfo(name, partition.num_outputs, num_tokens, bool(partition.calibration))
        )
    return DatabaseInfo(key, files.directory, files.num_refused, tuple(namespaces))


def open_to_read(root: Path, key: DatabaseKey) -> tuple[DatabaseFiles, OutputLog]:
    """The files of a database, which may be in use and stay as they are, and their content.

    Raises:
        DatabaseError: it does not exist, or cannot be read.
    """
    directory = database_directory(root, key)
    log = OutputLog(UNBOUNDED, UNBOUNDED)
    try:
        if not directory.is_dir():
            raise DatabaseError(f"there is no database at {directory}")
        files = DatabaseFiles(directory, key)
        files.read_generation()  # so that a damaged one counts
        files.restore(log)
    except OSError as error:
        raise DatabaseError(f"{directory} cannot be read: {error}") from error
    return files, log


def _generations(root: Path) -> list[Path]:
    """The file that identifies each database of this version below ``root``, also where its
    directory is closed.

    Raises:
        DatabaseError: ``root`` cannot be read.
    """
    try:
        found = [path / "generation" for path in _entries(databases_root(root))]
    except OSError as error:
        raise DatabaseError(f"{root} cannot be read: {error}") from error
    return [path for path in found if _may_exist(path)]


def _entries(directory: Path) -> list[Path]:
    """What is in ``directory``, if there is one; unlike a search for names, which passes over a
    closed directory.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return [directory / name for name in sorted(os.listdir(directory))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _may_exist(path: Path) -> bool:
    """Whether ``path`` exists, or nobody may look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
