"""The statistics database that a replica maps: one of its node, one fetched from the cluster, or
one that the administrator chose while it ran."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from actors.local_statistics import ensure_local
from actors.statistics_database import NO_RESOURCES, Choice, StatisticsClient
from deployments.replica.statistics_state import choice_key
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_info import INFO_NAME, TABLE_NAMES
from hdserve.errors import (
    DatabaseError,
    InvalidRequest,
    Overloaded,
    SnapshotError,
    Unsupported,
)

if TYPE_CHECKING:
    from hdserve.engine.async_engine import AsyncEngine
    from hdserve.engine.host import ModelHost

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
_OFFER_INTERVAL_S = 60.0
_MAX_RETRY_S = 600.0


def locate_statistics(
    directories: Iterable[Path],
    fingerprint: str,
    resources: Mapping[str, float] = NO_RESOURCES,
) -> Path | None:
    """Return the first of ``directories`` that exists on this node; else one that another node has,
    fetched into a cache that all replicas of this node share: one of ``directories``, or the
    largest database of the tokenizer.

    Databases of this node are registered with the statistics actor, so that others can fetch them.
    Without the actor this node's own are used: a missing one costs speed, never a request.

    Args:
        resources: what the actor reserves if it is started here.
    """
    wanted = [*directories]
    own = [directory for directory in wanted if os.path.isdir(directory)]
    try:
        found = ensure_local(
            fingerprint, _cache_directory(), directories=own, wanted=wanted, resources=resources
        )
    except DatabaseError as error:
        logger.warning("the cluster's statistics databases are not used: %s", error)
        found = []
    if own:
        return own[0]
    return next((directory for directory in found if _is_whole(directory, fingerprint)), None)


def _cache_directory() -> Path:
    return Path(tempfile.gettempdir()) / "hdserve-statistics"


def _is_whole(directory: Path, fingerprint: str) -> bool:
    try:
        StatisticsDatabase.open(directory, tokenizer=fingerprint)
    except SnapshotError as error:  # it is damaged, or was replaced meanwhile
        logger.error("not used, and fetched again the next time: %s", error)
        _discard_copy(directory)
        return False
    return True


def _discard_copy(directory: Path | None) -> None:
    """Delete a copy that cannot be used, so that the next one who asks fetches it again."""
    if directory is not None and _is_copy(directory):
        shutil.rmtree(directory, ignore_errors=True)


def _is_copy(directory: Path) -> bool:
    return directory.parent == _cache_directory()


class ChosenStatistics:
    """Checks the database a replica starts with and follows the administrator's choices, in a
    separate thread.

    The first database is used at once and given up if it turns out to be damaged.  A replica that
    had to start without its configuration's database keeps looking for it until the administrator
    has chosen one: its owner may have offered it since, or the actor may have been too busy.

    A database that is found or chosen is opened and read entirely here, so that it is intact and in
    memory when the engine's thread takes it over between two steps.  If a chosen one cannot be
    used, that is logged and tried again, as a volume may be late; meanwhile the previous one stays
    in use.

    The configuration's database is also offered to the cluster again and again, if it is this
    node's own and was not given up.

    Args:
        root: where databases may be chosen; ``None`` follows no choices.
        resources: what the statistics actor reserves if it is started here.

    Attributes:
        num_unusable: databases that were given up, or chosen and not used at once.
        num_failures: how often the choices could not be read.
    """

    def __init__(
        self,
        host: ModelHost,
        engine: AsyncEngine,
        root: Path | None,
        resources: Mapping[str, float] = NO_RESOURCES,
    ) -> None:
        self._host = host
        self._engine = engine
        self._root = root
        self._client = StatisticsClient(resources)
        self._fingerprint = host.tokenizer.fingerprint
        self._key = choice_key(host.config, self._fingerprint)
        self._tried: Choice | None = None
        self._own = host.statistics.directory if host.statistics else None
        self._retry_s = 0.0
        self._retry_at_s = math.inf
        self._is_looking = host.statistics is None
        self._look_s = _POLL_INTERVAL_S
        self._look_at_s = 0.0
        self.num_unusable = 0
        self.num_failures = 0
        self._has_failed = False
        self._checking = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hdserve-statistics", daemon=True)

    def start(self) -> None:
        """Start following the choices."""
        self._thread.start()

    def close(self) -> None:
        """Ask it to end soon, without waiting for it."""
        self._is_closed.set()

    def check(self, directory: str) -> None:
        """Check that a directory can be chosen, see :meth:`open`.

        Raises:
            Overloaded: another one is still being checked, perhaps on a volume that hangs.
        """
        if not self._checking.acquire(blocking=False):
            raise Overloaded("another statistics database is still being checked; try again later")
        try:
            self.open(directory)
        finally:
            self._checking.release()

    def open(self, directory: str) -> StatisticsDatabase:
        """Return the database in a directory below the root, read entirely and found intact.

        Raises:
            Unsupported: there is no root.
            InvalidRequest: the directory is elsewhere, or not a database of this tokenizer.
        """
        if self._root is None:
            raise Unsupported("no statistics_root is configured", "directory")
        try:
            database = StatisticsDatabase.open(
                _below(self._root, directory), tokenizer=self._fingerprint
            )
            database.verify()
        except SnapshotError as error:
            raise InvalidRequest(f"cannot be used: {error}", "directory") from error
        return database

    def _run(self) -> None:
        self._attempt(self._check_first)
        offer_at_s = time.monotonic() + _OFFER_INTERVAL_S
        while not self._is_closed.wait(_POLL_INTERVAL_S):
            parts = [self._follow, self._look]
            if time.monotonic() >= offer_at_s:
                offer_at_s = time.monotonic() + _OFFER_INTERVAL_S
                parts.insert(0, self._offer)
            self._attempt(*parts)

    def _attempt(self, *parts: Callable[[], None]) -> None:
        """Do each part, even if another fails: drafting continues with the present database."""
        had_failed, self._has_failed = self._has_failed, False
        for part in parts:
            try:
                part()
            except Exception as error:
                self.num_failures += 1
                if not (had_failed or self._has_failed):
                    is_expected = isinstance(error, DatabaseError)
                    logger.warning(
                        "choices of statistics databases are not seen: %s",
                        error,
                        exc_info=not is_expected,
                    )
                self._has_failed = True

    def _check_first(self) -> None:
        """Read all of the database the replica started with."""
        database = self._host.statistics
        if database is not None and not self._is_right(database):
            self._engine.call(lambda engine: self._host.use_statistics(engine, None))

    def _look(self) -> None:
        """Use the database that the configuration names, if it exists by now."""
        if not self._is_looking or time.monotonic() < self._look_at_s:
            return
        try:
            database = self._host.find_statistics()
        finally:
            self._look_at_s = time.monotonic() + self._look_s
            self._look_s = min(2 * self._look_s, _MAX_RETRY_S)
        if database is None:
            return
        self._own = database.directory
        if self._is_right(database):
            # The administrator may have chosen while it was fetched and read.
            self._attempt(self._follow)
            if self._is_looking:
                self._use(database)

    def _is_right(self, database: StatisticsDatabase) -> bool:
        """Read all of the configuration's database; a damaged one is given up for good, or, if it
        is a copy, until it is fetched again."""
        try:
            database.verify()
        except SnapshotError as error:
            self.num_unusable += 1
            logger.error("%s: drafting without statistics: %s", self._host.config.name, error)
            self._is_looking = self._own is not None and _is_copy(self._own)
            _discard_copy(database.directory)
            self._withdraw()
            return False
        return True

    def _use(self, database: StatisticsDatabase) -> None:
        self._is_looking = False
        self._engine.call(lambda engine: self._host.use_statistics(engine, database))
        logger.info("drafting from the statistics database %s", database.directory)

    def _offered(self) -> Path | None:
        """The directory that other nodes may fetch from this one."""
        return None if self._own is not None and _is_copy(self._own) else self._own

    def _offer(self) -> None:
        """Offer this node's database to other nodes, even if the actor was restarted."""
        if (own := self._offered()) is not None:
            with contextlib.suppress(DatabaseError):  # for example, the actor's node lacks it
                self._client.offer(self._fingerprint, own)

    def _withdraw(self) -> None:
        """Stop offering this node's database to other nodes."""
        if (own := self._offered()) is not None:
            with contextlib.suppress(DatabaseError):  # the actor may be out of reach
                self._client.withdraw(own)
        self._own = None

    def _follow(self) -> None:
        if self._root is None:
            return
        choice = self._client.choice(self._key, self._tried)
        is_new = choice != self._tried
        if choice is None or (not is_new and time.monotonic() < self._retry_at_s):
            return
        self._tried = choice
        self._retry_s = _POLL_INTERVAL_S if is_new else min(2 * self._retry_s, _MAX_RETRY_S)
        self._retry_at_s = time.monotonic() + self._retry_s
        try:
            database = self.open(choice.directory)
        except InvalidRequest as error:
            if is_new:
                self.num_unusable += 1
                logger.error("the chosen statistics database %s", error.message)
            return
        self._retry_at_s = math.inf
        self._use(database)


def _below(root: Path, directory: str) -> Path:
    """Return ``directory`` below ``root``.

    Raises:
        InvalidRequest: ``directory``, or a file of the database in it, is not below ``root``.
    """
    wanted = PurePosixPath(directory)
    try:
        place = root.resolve()
        found = (place / wanted).resolve()
        paths = (found, *((found / name).resolve() for name in (INFO_NAME, *TABLE_NAMES)))
        is_below = all(path.is_relative_to(place) for path in paths)
    except (OSError, RuntimeError, ValueError):  # circular links, or a null byte
        is_below = False
    if wanted.is_absolute() or ".." in wanted.parts or not is_below:
        raise InvalidRequest("a directory below statistics_root is expected", "directory")
    return found
