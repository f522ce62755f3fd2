"""The actor that knows which corpora there are, and hands them to nodes that lack them.

A statistics database is a directory of immutable files.  A replica maps the files of its own
node, so that all replicas of a node share its page cache; the actor is never asked while a token
is waited for.  What the files contain is :mod:`hdserve.databases.statistics`' business: here they
are names, sizes and checksums.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import ray
from filelock import FileLock
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors.corpus import Corpus, describe, file_checksum
from hdserve.databases.snapshot import FORMAT_VERSION, sync_directory
from hdserve.errors import DatabaseError, DatabaseGone

logger = logging.getLogger(__name__)

RAY_NAMESPACE = "hdserve"
METHODS_VERSION = 2
"""Raised when the actor learns a method that replicas call.  It is a part of the actor's name,
because one that outlives an upgrade keeps the methods it was started with."""

ACTOR_NAME = f"statistics-database-v{FORMAT_VERSION}.{METHODS_VERSION}"
CHUNK_BYTES = 8 * 2**20

FILES_TIMEOUT_S = 600.0
"""Long enough for the checksums of a corpus of some gigabytes on a slow disk."""

CALL_TIMEOUT_S = 60.0
"""How long a call may take that the actor answers at once.  A replica waits that long where no node
has room for the actor."""

NUM_CPUS = 0.1
_CHOICE_TIMEOUT_S = 10.0
_NUM_ATTEMPTS = 30
_RETRY_S = 1.0
_ORDER_MARK = "."
_PARTIAL_SUFFIX = ".partial"


class Choice(NamedTuple):
    """A corpus the administrator chose.

    Attributes:
        directory: below the root of the configuration.
        number: another one each time, so that a directory can be read anew; of what the actor has
            kept it says which was the later choice.
    """

    directory: str
    number: str

    @property
    def order(self) -> int:
        """The later choice has the higher one; 0 where the number is of an earlier version."""
        order, mark, _ = self.number.partition(_ORDER_MARK)
        return int(order) if mark and order.isdecimal() else 0

    def after(self, earlier: Choice | None) -> Choice:
        """The same choice, made now: later than ``earlier`` whatever the clock says."""
        order = max(time.time_ns(), earlier.order + 1 if earlier else 0)
        return self._replace(number=f"{order}{_ORDER_MARK}{self.number}")


class StatisticsDatabaseActor:
    """The catalogue; a plain class, so that tests can call it without Ray."""

    def __init__(self) -> None:
        self._corpora: dict[str, Corpus] = {}
        self._checksums: dict[str, dict[str, str]] = {}
        self._choices: dict[str, Choice] = {}
        self._chosen_here: set[str] = set()
        """Models whose last choice this run of the actor was told of: no reminder is of a later
        one, whatever the clock said when it was made."""

    def register(self, fingerprint: str, directory: str) -> Corpus:
        """Offer the corpus in ``directory`` to the cluster; registering it again is harmless.

        What stood in ``directory`` before is offered no longer.

        Raises:
            DatabaseError: the actor's node has no such database of this tokenizer.
        """
        corpus = _of_tokenizer(fingerprint, Path(directory))
        for other in list(self._corpora.values()):
            if other.directory == corpus.directory and other.corpus_id != corpus.corpus_id:
                self._forget(other.corpus_id)
        return self._corpora.setdefault(corpus.corpus_id, corpus)

    def catalogue(self, fingerprint: str) -> list[Corpus]:
        """The corpora of one tokenizer, in the order of registration."""
        return [item for item in self._corpora.values() if item.fingerprint == fingerprint]

    def checksums(self, corpus_id: str) -> dict[str, str]:
        """BLAKE2b-128 of each file; reads them all the first time.

        Raises:
            DatabaseError: unknown, or changed since it was registered.
        """
        if corpus_id not in self._checksums:
            corpus = self._known(corpus_id)
            directory = Path(corpus.directory)
            if describe(corpus.fingerprint, directory).corpus_id != corpus_id:
                raise DatabaseError(f"{directory} has changed since it was registered")
            self._checksums[corpus_id] = {
                name: file_checksum(directory / name) for name in corpus.sizes
            }
        return self._checksums[corpus_id]

    def read_chunk(self, corpus_id: str, name: str, offset: int) -> NDArray[np.uint8]:
        """Up to ``CHUNK_BYTES`` of a file; Ray passes them through the object store.

        Raises:
            DatabaseError: there is no such corpus or file, or it cannot be read.
        """
        corpus = self._known(corpus_id)
        if name not in corpus.sizes:
            raise DatabaseError(f"the corpus {corpus_id} has no file {name!r}")
        try:
            return np.fromfile(
                Path(corpus.directory) / name, np.uint8, count=CHUNK_BYTES, offset=offset
            )
        except OSError as error:
            raise DatabaseError(f"{name!r} of {corpus.directory} cannot be read") from error

    def choose(self, model: str, choice: Choice) -> None:
        """The administrator wants the replicas of ``model`` to draft from this."""
        self._choices[model] = choice.after(self._choices.get(model))
        self._chosen_here.add(model)

    def choice(self, model: str, reminder: Choice | None = None) -> Choice | None:
        """What was chosen for ``model``, if anything was.

        Args:
            reminder: what a replica knows was; counts where an actor that was restarted has
                forgotten, or was reminded of an earlier choice only.
        """
        kept = self._choices.get(model)
        if reminder is not None and (kept is None or reminder.order > kept.order):
            is_earlier = model in self._chosen_here
            self._choices[model] = kept = kept.after(reminder) if kept and is_earlier else reminder
        return kept

    def _forget(self, corpus_id: str) -> None:
        del self._corpora[corpus_id]
        self._checksums.pop(corpus_id, None)

    def _known(self, corpus_id: str) -> Corpus:
        try:
            return self._corpora[corpus_id]
        except KeyError:
            raise DatabaseError(f"no corpus {corpus_id} is registered") from None


def get_or_create() -> Any:
    """A handle of the cluster's statistics actor, which is started if there is none.

    Raises:
        RayError: the cluster cannot be reached.
    """
    options = ray.remote(StatisticsDatabaseActor).options(
        name=ACTOR_NAME,
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=NUM_CPUS,
    )
    return options.remote()


def choose(model: str, choice: Choice) -> None:
    """Have the replicas of ``model`` draft from another corpus.

    Args:
        model: its name, and whatever else a replica must agree in.

    Raises:
        DatabaseError: the actor is out of reach.
    """
    _ask(_CHOICE_TIMEOUT_S, "choose", model, choice)


def current_choice(model: str, reminder: Choice | None) -> Choice | None:
    """What was chosen last; see :meth:`StatisticsDatabaseActor.choice`.

    Raises:
        DatabaseError: the actor is out of reach.
    """
    found: Choice | None = _ask(_CHOICE_TIMEOUT_S, "choice", model, reminder)
    return found


def offer(fingerprint: str, directory: Path) -> None:
    """Register a corpus of this node again, as an actor that was restarted has forgotten it.

    Raises:
        DatabaseError: the actor is out of reach, or its node has no such database of this
            tokenizer.
    """
    _ask(CALL_TIMEOUT_S, "register", fingerprint, str(directory.absolute()))


def ensure_local(
    fingerprint: str,
    cache_dir: Path,
    *,
    directories: Iterable[Path] = (),
    is_always_copied: bool = False,
) -> list[Path]:
    """Directories on this node with ``directories``, or, if there are none, with the largest corpus
    of a tokenizer that the cluster has and that can be had.

    A corpus that this node has where the actor has it (image, wheel, volume) is used there.
    Otherwise its files are fetched in chunks into ``cache_dir``, once per node however many
    replicas ask, checked, and moved into place together.  One that cannot be fetched is left out,
    with an error in the log.  While the actor knows of none, as after its restart, what was fetched
    before is used.

    Args:
        directories: corpora of this node, to be registered first; each is used even if the
            actor's node lacks it.
        is_always_copied: copy what is not below ``cache_dir`` even if this node has it, as on a
            slow network volume.

    Raises:
        DatabaseError: the actor is out of reach, or one of ``directories`` could not be fetched
            or is no statistics database of this tokenizer.
    """
    own = [_of_tokenizer(fingerprint, Path(directory)) for directory in directories]
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            return _ensure_local(fingerprint, cache_dir, own, is_always_copied)
        except RayActorError as error:
            if attempt == _NUM_ATTEMPTS:
                raise DatabaseError(f"the statistics actor cannot be reached: {error}") from error
            logger.warning("the statistics actor is gone and is tried again")
            time.sleep(_RETRY_S)
        except RayError as error:
            raise DatabaseError(f"the statistics actor failed: {error}") from error
    raise AssertionError("unreachable")


def _ensure_local(
    fingerprint: str, cache_dir: Path, own: list[Corpus], is_always_copied: bool
) -> list[Path]:
    actor = get_or_create()
    for corpus in own:
        try:
            _call(actor, "register", fingerprint, corpus.directory)
        except DatabaseGone:
            raise
        except DatabaseError as error:
            logger.warning("other nodes cannot have %s: %s", corpus.directory, error)
    found = {corpus.corpus_id: corpus for corpus in [*_call(actor, "catalogue", fingerprint), *own]}
    _drop_partial(cache_dir)
    if found:
        _drop_outdated(fingerprint, cache_dir, found)
    else:
        found = _copies(fingerprint, cache_dir)
    if own:
        return [_local(actor, corpus, cache_dir, is_always_copied) for corpus in own]
    for corpus in sorted(found.values(), key=_num_bytes, reverse=True):
        try:
            return [_local(actor, corpus, cache_dir, is_always_copied)]
        except DatabaseError as error:
            logger.error("done without the corpus %s: %s", corpus.directory, error)
    return []


def _num_bytes(corpus: Corpus) -> int:
    return sum(corpus.sizes.values())


def _drop_outdated(fingerprint: str, cache_dir: Path, current: Container[str]) -> None:
    """Delete the copies of a tokenizer's corpora that are offered no longer, but for those that
    are being fetched; a process that has mapped one keeps it."""
    for directory in cache_dir.glob("[!.]*/"):
        if directory.name not in current and _tokenizer_of(directory) == fingerprint:
            _delete_unless_fetched(directory, directory.name)


def _drop_partial(cache_dir: Path) -> None:
    """Delete what is left of copies whose process was killed."""
    for directory in cache_dir.glob(f".*{_PARTIAL_SUFFIX}/"):
        _delete_unless_fetched(directory, directory.name[1 : -len(_PARTIAL_SUFFIX)])


def _delete_unless_fetched(directory: Path, corpus_id: str) -> None:
    """Delete ``directory`` unless a process is fetching the corpus."""
    with suppress(OSError), FileLock(directory.parent / f"{corpus_id}.lock", timeout=0):
        shutil.rmtree(directory, ignore_errors=True)


def _copies(fingerprint: str, cache_dir: Path) -> dict[str, Corpus]:
    """The corpora of a tokenizer that were fetched before, where their copies are."""
    found = {}
    for directory in cache_dir.glob("[!.]*/"):
        with suppress(DatabaseError):
            corpus = _of_tokenizer(fingerprint, directory)
            if corpus.corpus_id == directory.name:
                found[corpus.corpus_id] = corpus
    return found


def _of_tokenizer(fingerprint: str, directory: Path) -> Corpus:
    """The corpus in ``directory`` on this node.

    Raises:
        DatabaseError: it is no statistics database, or one of another tokenizer.
    """
    corpus = describe(fingerprint, directory.absolute())
    if corpus.info.get("tokenizer") != fingerprint:
        raise DatabaseError(f"{directory} was made for another tokenizer")
    return corpus


def _tokenizer_of(directory: Path) -> object:
    """What the description of a corpus says it is of."""
    try:
        return describe("", directory).info.get("tokenizer")
    except DatabaseError:
        return None


def _local(actor: Any, corpus: Corpus, cache_dir: Path, is_always_copied: bool) -> Path:
    """Where this node has a corpus, which is fetched if need be."""
    directory = Path(corpus.directory)
    if is_always_copied or not _holds(directory, corpus):
        return _fetch(actor, corpus, cache_dir)
    return directory


def _holds(directory: Path, corpus: Corpus) -> bool:
    """Whether ``directory`` on this node is that corpus."""
    try:
        return describe(corpus.fingerprint, directory).corpus_id == corpus.corpus_id
    except DatabaseError:
        return False


def _fetch(actor: Any, corpus: Corpus, cache_dir: Path) -> Path:
    """Copy a corpus into ``cache_dir`` unless another process of this node has."""
    target = cache_dir / corpus.corpus_id
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / f"{corpus.corpus_id}.lock"):
            if not _holds(target, corpus):
                _copy(actor, corpus, target)
    except OSError as error:
        raise DatabaseError(f"{cache_dir} cannot take the corpus: {error}") from error
    return target


def _copy(actor: Any, corpus: Corpus, target: Path) -> None:
    checksums = _call(actor, "checksums", corpus.corpus_id, timeout_s=FILES_TIMEOUT_S)
    partial = target.with_name(f".{target.name}{_PARTIAL_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    try:
        for name in corpus.sizes:
            _fetch_file(actor, corpus, name, partial, checksums.get(name, ""))
        partial.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("fetched the corpus %s to %s", corpus.directory, target)


def _fetch_file(actor: Any, corpus: Corpus, name: str, directory: Path, checksum: str) -> None:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise DatabaseError(f"the corpus names a file outside itself: {name!r}")
    path = directory / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=16)
    with path.open("wb") as file:
        for offset in range(0, corpus.sizes[name], CHUNK_BYTES):
            place = corpus.corpus_id, name, offset
            chunk = _call(actor, "read_chunk", *place, timeout_s=FILES_TIMEOUT_S)
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != checksum:
        raise DatabaseError(f"{name!r} of {corpus.directory} arrived with a wrong checksum")


def _ask(timeout_s: float, method: str, *args: Any) -> Any:
    """
    Raises:
        DatabaseError: as the method raised it.
        DatabaseGone: it took too long, or the actor is out of reach.
    """
    try:
        return _call(get_or_create(), method, *args, timeout_s=timeout_s)
    except RayError as error:
        raise DatabaseGone("the statistics actor is out of reach; try again") from error


def _call(actor: Any, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """
    Raises:
        DatabaseError: as the method raised it.
        DatabaseGone: it took too long.
        RayError: the actor could not be reached.
    """
    try:
        return ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
    except GetTimeoutError as error:
        raise DatabaseGone(f"the statistics actor did not answer: {method}") from error
    except RayTaskError as error:
        if isinstance(error.cause, DatabaseError):
            raise error.cause from None
        raise
