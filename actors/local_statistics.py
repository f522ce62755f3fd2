"""The statistics databases of this node, to which missing ones are copied.

All replicas of a node map the same files, and so share the page cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout
from ray.exceptions import RayActorError, RayError

from actors.statistics_database import (
    CHUNK_BYTES,
    FILES_TIMEOUT_S,
    NO_RESOURCES,
    OFFERED_FOR_S,
    call,
    get_or_create,
)
from actors.statistics_files import StatisticsFiles, describe_for
from hdserve.databases.snapshot import sync_directory
from hdserve.errors import DatabaseError, DatabaseGone

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 30
_RETRY_S = 1.0

_FETCHED_ELSEWHERE_S = 60.0
"""How long to wait for another process of this node that fetches the same database."""

_PARTIAL_SUFFIX = ".partial"


def ensure_local(
    fingerprint: str,
    cache_dir: Path,
    *,
    directories: Iterable[Path] = (),
    wanted: Iterable[Path] = (),
    resources: Mapping[str, float] = NO_RESOURCES,
) -> list[Path]:
    """``directories``, or, if there are none, this node's directory of a database of a tokenizer
    that the cluster has and that is available: one of ``wanted``, else the largest.

    A database that this node has under the same path as the actor (image, wheel, volume) is used
    there. Otherwise its files are fetched in chunks into ``cache_dir``, once per node however many
    replicas ask, checked, and moved into place together.  One that cannot be fetched is skipped,
    with an error in the log; one that another process takes long to fetch is not replaced by
    another.  Copies fetched earlier are also used while the actor knows of none, and after its
    restart, until all have offered theirs again; only then are copies deleted that nobody offers.

    Args:
        directories: databases of this node, to be registered first; it is no problem if the
            actor's node lacks them.
        wanted: where nodes that have them have the databases that are asked for.
        resources: what the actor reserves if it is started here.

    Raises:
        DatabaseError: the actor is out of reach, or one of ``directories`` is not a statistics
            database of this tokenizer.
    """
    own = [describe_for(fingerprint, Path(directory)) for directory in directories]
    places = {str(directory.absolute()) for directory in wanted}
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            actor = get_or_create(resources)
            return _ensure_local(actor, fingerprint, cache_dir, own, places)
        except RayActorError as error:
            if attempt == _NUM_ATTEMPTS:
                raise DatabaseError(f"the statistics actor cannot be reached: {error}") from error
            logger.warning("the statistics actor is gone, trying again")
            time.sleep(_RETRY_S)
        except RayError as error:
            raise DatabaseError(f"the statistics actor failed: {error}") from error
    raise AssertionError("unreachable")


def _ensure_local(
    actor: Any, fingerprint: str, cache_dir: Path, own: list[StatisticsFiles], wanted: set[str]
) -> list[Path]:
    for database in own:
        try:
            call(actor, "register", fingerprint, database.directory)
        except DatabaseGone:
            raise
        except DatabaseError as error:
            told = "cannot offer the statistics database %s to other nodes: %s"
            logger.warning(told, database.directory, error)
    offered: list[StatisticsFiles] = call(actor, "catalogue", fingerprint)
    found = {database.database_id: database for database in [*offered, *own]}
    # An actor of this age knows everything again that it knew before a restart.
    is_complete = call(actor, "age_s") >= OFFERED_FOR_S  # first, as it may be restarted now
    _drop_partial(cache_dir)
    if found and is_complete:
        _drop_outdated(fingerprint, cache_dir, found)
    else:
        found = _copies(fingerprint, cache_dir) | found
    if own:
        return [Path(database.directory) for database in own]

    def rank(database: StatisticsFiles) -> tuple[bool, int]:
        return database.directory in wanted, database.num_bytes

    for database in sorted(found.values(), key=rank, reverse=True):
        try:
            return [_local(actor, database, cache_dir)]
        except Timeout:
            logger.warning(
                "the statistics database %s is not used yet: another process of this node has not "
                "fetched it in %g s",
                database.directory,
                _FETCHED_ELSEWHERE_S,
            )
            break
        except DatabaseError as error:
            logger.error("the statistics database %s is not used: %s", database.directory, error)
    return []


def _drop_outdated(fingerprint: str, cache_dir: Path, current: Container[str]) -> None:
    """Delete the copies of a tokenizer's databases that are no longer offered, except those being
    fetched; a process that has mapped one keeps it."""
    for directory in cache_dir.glob("[!.]*/"):
        if directory.name not in current:
            with suppress(DatabaseError):  # it is of another tokenizer
                describe_for(fingerprint, directory)
                _delete_unless_fetched(directory, directory.name)


def _drop_partial(cache_dir: Path) -> None:
    """Delete the remains of copies whose process was killed."""
    for directory in cache_dir.glob(f".*{_PARTIAL_SUFFIX}/"):
        _delete_unless_fetched(directory, directory.name[1 : -len(_PARTIAL_SUFFIX)])


def _delete_unless_fetched(directory: Path, database_id: str) -> None:
    """Delete ``directory`` unless a process is fetching the database."""
    with suppress(OSError), FileLock(directory.parent / f"{database_id}.lock", timeout=0):
        shutil.rmtree(directory, ignore_errors=True)


def _copies(fingerprint: str, cache_dir: Path) -> dict[str, StatisticsFiles]:
    """The databases of a tokenizer that were fetched before, by the directories of their copies."""
    found = {}
    for directory in cache_dir.glob("[!.]*/"):
        with suppress(DatabaseError):
            database = describe_for(fingerprint, directory)
            if database.database_id == directory.name:
                found[database.database_id] = database
    return found


def _local(actor: Any, database: StatisticsFiles, cache_dir: Path) -> Path:
    """Where this node has a database, which is fetched if needed.

    Raises:
        Timeout: another process has been fetching it for long.
    """
    for directory in (Path(database.directory), cache_dir / database.database_id):
        if database.is_in(directory):
            return directory
    return _fetch(actor, database, cache_dir)


def _fetch(actor: Any, database: StatisticsFiles, cache_dir: Path) -> Path:
    """Copy a database into ``cache_dir`` unless another process of this node has."""
    target = cache_dir / database.database_id
    logger.info("fetching the statistics database %s, or waiting for who does", database.directory)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / f"{target.name}.lock", timeout=_FETCHED_ELSEWHERE_S):
            if not database.is_in(target):
                _copy(actor, database, target)
    except Timeout:
        raise
    except OSError as error:
        raise DatabaseError(f"{cache_dir} cannot take the statistics database: {error}") from error
    return target


def _copy(actor: Any, database: StatisticsFiles, target: Path) -> None:
    checksums = call(actor, "checksums", database.database_id, timeout_s=FILES_TIMEOUT_S)
    partial = target.with_name(f".{target.name}{_PARTIAL_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    try:
        for name in database.sizes:
            _fetch_file(actor, database, name, partial, checksums.get(name, ""))
        partial.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("fetched the statistics database %s to %s", database.directory, target)


def _fetch_file(
    actor: Any, database: StatisticsFiles, name: str, directory: Path, checksum: str
) -> None:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise DatabaseError(f"the statistics database names a file outside itself: {name!r}")
    path = directory / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=16)
    with path.open("wb") as file:
        for offset in range(0, database.sizes[name], CHUNK_BYTES):
            place = database.database_id, name, offset
            chunk = call(actor, "read_chunk", *place, timeout_s=FILES_TIMEOUT_S)
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != checksum:
        raise DatabaseError(f"{name!r} of {database.directory} arrived with a wrong checksum")
