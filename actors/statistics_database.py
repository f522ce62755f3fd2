"""The actor that knows which statistics databases exist, and sends them to nodes that lack them.

A statistics database is a directory of immutable files.  A replica maps those of its own node
(:mod:`actors.local_statistics`); the actor is never called while a token is generated.  Files are
only names, sizes and checksums here; their content is for :mod:`hdserve.databases.statistics`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors import detached
from actors.statistics_files import StatisticsFiles, describe, describe_for, file_checksum
from hdserve.databases.snapshot import FORMAT_VERSION
from hdserve.errors import DatabaseError, DatabaseGone

METHODS_VERSION = 5
"""Increased when replicas or gateways call the actor differently: another method, or another
answer.  It is part of the actor's name, because an actor that outlives an upgrade keeps the methods
it was started with."""

ACTOR_NAME = f"statistics-database-v{FORMAT_VERSION}.{METHODS_VERSION}"
CHUNK_BYTES = 8 * 2**20

FILES_TIMEOUT_S = 600.0
"""Enough for the checksums of a database of some gigabytes on a slow disk."""

CALL_TIMEOUT_S = 60.0
"""How long a call may take that the actor answers at once.  A replica waits this long if no node
has room for the actor."""

OFFERED_FOR_S = 600.0
"""How long a database counts as offered: whoever has it says so every minute."""

NUM_CPUS = 0.1

_FILE_THREADS: Final[Mapping[str, int]] = MappingProxyType({"checksums": 1, "chunks": 1})
"""Threads that read files, which takes minutes, where other methods take a moment.  All checksums
are read in one of them, so that files several nodes ask for are read once."""

NO_RESOURCES: Final[Mapping[str, float]] = MappingProxyType({})
_CHOICE_TIMEOUT_S = 10.0


class Choice(NamedTuple):
    """A database the administrator chose.

    Attributes:
        directory: below the root of the configuration.
        order: higher for later choices; so a directory that is chosen again is also read
            again.
    """

    directory: str
    order: int

    @classmethod
    def after(cls, earlier: Choice | None, directory: str) -> Choice:
        """A choice made now, later than ``earlier`` whatever the clock says."""
        return cls(directory, max(time.time_ns(), earlier.order + 1 if earlier else 0))


class StatisticsDatabaseActor:
    """The catalogue; a plain class, so that tests can call it without Ray.

    In Ray, files are read in separate threads; one thread does everything else, and only that one
    changes what is offered.
    """

    def __init__(self) -> None:
        self._started_at_s = time.monotonic()
        self._databases: dict[str, StatisticsFiles] = {}
        self._offered_at_s: dict[str, float] = {}
        self._checksums: dict[str, dict[str, str]] = {}
        """Checksums of the databases for which they were requested, empty for the others.  Each
        entry is dropped with its registration, even while its files are still being read."""
        self._choices: dict[str, Choice] = {}
        self._chosen_here: set[str] = set()
        """Models for which this run of the actor was told a choice: any reminder is older, whatever
        the clock said when it was made."""

    def register(self, fingerprint: str, directory: str) -> StatisticsFiles:
        """Offer the database in ``directory`` to the cluster; registering it again is harmless.

        What was in ``directory`` before is no longer offered.

        Raises:
            DatabaseError: the actor's node has no such database of this tokenizer.
        """
        database = describe_for(fingerprint, Path(directory))
        for other in list(self._databases.values()):
            if other.directory == database.directory and other.database_id != database.database_id:
                self._forget(other.database_id)
        self._checksums.setdefault(database.database_id, {})
        self._offered_at_s[database.database_id] = time.monotonic()
        return self._databases.setdefault(database.database_id, database)

    def withdraw(self, directory: str) -> None:
        """Stop offering the database in ``directory``, because it is damaged; a node with an intact
        copy under the same path offers it again."""
        for database in list(self._databases.values()):
            if database.directory == directory:
                self._forget(database.database_id)

    def catalogue(self, fingerprint: str) -> list[StatisticsFiles]:
        """The databases of one tokenizer, in the order of registration; without those of which
        nothing was heard any more, for ``OFFERED_FOR_S``, when another was offered last."""
        found = [item for item in self._databases.values() if item.fingerprint == fingerprint]
        offered_at_s = [self._offered_at_s[item.database_id] for item in found]
        since_s = max(offered_at_s, default=0.0) - OFFERED_FOR_S
        return [item for item, at_s in zip(found, offered_at_s, strict=True) if at_s > since_s]

    def age_s(self) -> float:
        """Seconds since the start of the actor; whatever was offered before that is forgotten."""
        return time.monotonic() - self._started_at_s

    @ray.method(concurrency_group="checksums")
    def checksums(self, database_id: str) -> dict[str, str]:
        """BLAKE2b-128 of each file; reads all files the first time.

        Raises:
            DatabaseError: unknown, or changed since it was registered.
        """
        database = self._known(database_id)
        found = self._checksums.get(database_id, {})
        if not found:
            directory = Path(database.directory)
            if describe(directory).database_id != database_id:
                raise DatabaseError(f"{directory} has changed since it was registered")
            found.update({name: file_checksum(directory / name) for name in database.sizes})
        return found

    @ray.method(concurrency_group="chunks")
    def read_chunk(self, database_id: str, name: str, offset: int) -> NDArray[np.uint8]:
        """Up to ``CHUNK_BYTES`` of a file; Ray passes them through the object store.

        Raises:
            DatabaseError: there is no such database or file, or it cannot be read.
        """
        database = self._known(database_id)
        if name not in database.sizes:
            raise DatabaseError(f"the statistics database {database_id} has no file {name!r}")
        try:
            return np.fromfile(
                Path(database.directory) / name, np.uint8, count=CHUNK_BYTES, offset=offset
            )
        except OSError as error:
            raise DatabaseError(f"{name!r} of {database.directory} cannot be read") from error

    def choose(self, model: str, directory: str) -> None:
        """The administrator wants the replicas of ``model`` to draft from ``directory``."""
        self._choices[model] = Choice.after(self._choices.get(model), directory)
        self._chosen_here.add(model)

    def choice(self, model: str, reminder: Choice | None = None) -> Choice | None:
        """What was chosen for ``model``, if anything was.

        Args:
            reminder: the choice a replica knows; used if the actor was restarted and has forgotten
                it, or knows only an earlier choice.
        """
        kept = self._choices.get(model)
        if reminder is None or (kept is not None and reminder.order <= kept.order):
            return kept
        if kept is not None and model in self._chosen_here:
            reminder = Choice.after(reminder, kept.directory)
        self._choices[model] = reminder
        return reminder

    def _forget(self, database_id: str) -> None:
        del self._databases[database_id]
        del self._checksums[database_id]
        del self._offered_at_s[database_id]

    def _known(self, database_id: str) -> StatisticsFiles:
        try:
            return self._databases[database_id]
        except KeyError:
            raise DatabaseError(f"no statistics database {database_id} is registered") from None


def get_or_create(resources: Mapping[str, float] = NO_RESOURCES) -> Any:
    """A handle of the cluster's statistics actor, which is started if there is none.

    Args:
        resources: custom resources that a new one reserves.

    Raises:
        RayError: the cluster cannot be reached.
    """
    return detached.get_or_create(
        StatisticsDatabaseActor,
        ACTOR_NAME,
        NUM_CPUS,
        resources,
        concurrency_groups=_FILE_THREADS,
    )


class StatisticsClient:
    """What replicas and gateways ask of the cluster's statistics actor, which is started if there
    is none.

    Args:
        resources: see :func:`get_or_create`.
    """

    def __init__(self, resources: Mapping[str, float] = NO_RESOURCES) -> None:
        self._resources = resources

    def choose(self, model: str, directory: str) -> None:
        """Make the replicas of ``model`` draft from another database.

        Args:
            model: its name, and anything else that replicas must agree in.

        Raises:
            DatabaseError: the actor is out of reach; this holds for all methods.
        """
        self._ask(_CHOICE_TIMEOUT_S, "choose", model, directory)

    def choice(self, model: str, reminder: Choice | None) -> Choice | None:
        """What was chosen last; see :meth:`StatisticsDatabaseActor.choice`."""
        found: Choice | None = self._ask(_CHOICE_TIMEOUT_S, "choice", model, reminder)
        return found

    def offer(self, fingerprint: str, directory: Path) -> None:
        """Register a database of this node again, as a restarted actor has forgotten it.

        Raises:
            DatabaseError: also if the actor's node has no such database of this tokenizer.
        """
        self._ask(CALL_TIMEOUT_S, "register", fingerprint, str(directory.absolute()))

    def withdraw(self, directory: Path) -> None:
        """Stop offering a damaged database of this node."""
        self._ask(CALL_TIMEOUT_S, "withdraw", str(directory.absolute()))

    def _ask(self, timeout_s: float, method: str, *args: Any) -> Any:
        """
        Raises:
            DatabaseError: the method raised it.
            DatabaseGone: it took too long, or the actor is out of reach.
        """
        try:
            return call(get_or_create(self._resources), method, *args, timeout_s=timeout_s)
        except RayError as error:
            raise DatabaseGone("the statistics actor is out of reach; try again") from error


def call(actor: Any, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """The answer of a method of the statistics actor.

    Raises:
        DatabaseError: the method raised it.
        DatabaseGone: it took too long.
        RayError: the actor could not be reached.
    """
    answer = getattr(actor, method).remote(*args)
    try:
        return ray.get(answer, timeout=timeout_s)
    except GetTimeoutError as error:
        ray.cancel(answer)  # it may not have begun, and is asked again
        raise DatabaseGone(f"the statistics actor did not answer: {method}") from error
    except RayTaskError as error:
        if isinstance(error.cause, DatabaseError):
            raise error.cause from None
        raise
