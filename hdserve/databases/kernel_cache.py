"""Where compiled functions are cached between runs, and when they are out of date.

numba keeps a compiled function until the file that defines it changes.  Here functions of several
modules are compiled into one, and a stale one would read wrong addresses, so all modules that are
compiled together count: after a change to any of them all their functions are compiled again.

Processes that start together do not all compile: the first does, the others wait for it.

Code compiled for one processor is not used on another, except code for a baseline processor, as
container images bring it, on processors where newer instructions would not help.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from filelock import FileLock
from numba.core import caching

logger = logging.getLogger(__name__)

_COMPILED_TOGETHER = ("databases", "drafting")
COMPILED_INTO_ALL: Final = (
    Path(__file__).parents[1] / "noise.py",
    Path(__file__).with_name("cache_lines.py"),
    Path(__file__).with_name("compiled.py"),
)
"""Modules of other folders that are compiled into kernels, or say how kernels are compiled."""

_MAX_WAIT_S = 300.0
"""How long to wait for another process that compiles the same function before this one compiles it
too."""

BASELINES: Final = {
    "x86_64": (
        "x86-64-v3",
        frozenset({"+avx2", "+bmi", "+bmi2", "+f16c", "+fma", "+lzcnt", "+movbe"}),
    ),
    "aarch64": ("generic", frozenset[str]()),
}
"""For each architecture the name of the baseline processor, and the features a processor needs to
run code compiled for it."""


@cache
def sources_digest(folder: Path) -> str:
    """A digest of all modules that are compiled together with those in ``folder``."""
    folders = [folder]
    if folder.name in _COMPILED_TOGETHER:
        folders = [folder.parent / name for name in _COMPILED_TOGETHER]
    digest = hashlib.sha256()
    own = sorted(path for each in folders for path in each.glob("*.py"))
    for path in (*own, *COMPILED_INTO_ALL):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _StampedByAll:
    _py_file: str

    def get_source_stamp(self) -> str:
        return sources_digest(Path(self._py_file).parent)


class _Provided(_StampedByAll, caching.UserProvidedCacheLocator):
    """``NUMBA_CACHE_DIR``, which may have been filled before and be read-only now."""

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)  # type: ignore[no-untyped-call]


class _InTree(_StampedByAll, caching.InTreeCacheLocator):
    """``__pycache__`` next to the source."""


class _UserWide(_StampedByAll, caching.UserWideCacheLocator):
    """The user's cache directory, if the source's cannot be written to."""


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Provided, _InTree, _UserWide]  # noqa: RUF012 - as in the base class


class _Baseline:
    """The part of a compilation target that the cache reads, for the baseline processor."""

    def __init__(self, triple: str, name: str) -> None:
        self._target = (triple, name, "")

    def magic_tuple(self) -> tuple[str, str, str]:
        return self._target


class KernelCache(caching.FunctionCache):
    """The cache of one compiled function.

    Args:
        takes_baseline: also use code that was compiled for this processor's baseline.
    """

    _impl_class = _Implementation

    def __init__(self, function: Any, *, takes_baseline: bool) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._takes_baseline = takes_baseline
        path = Path(self._cache_path, f"{self._impl.filename_base}.lock")
        self._lock = FileLock(path, timeout=_MAX_WAIT_S, thread_local=False)

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code of a signature.  If there is none this process compiles it next, and holds the
        lock until it has been saved."""
        found = self._find(sig, target_context)
        if found is None:
            with suppress(OSError):  # the directory is read-only, or another process takes too long
                if not self._lock.is_locked:  # held if an earlier compilation here was interrupted
                    self._lock.acquire()
                found = self._find(sig, target_context)
        if found is not None:
            self._lock.release()
        return found

    def _save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._drop_outdated()
            super()._save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            _warn(f"compiled code is not kept in {self._cache_path}: {error.strerror}")
        finally:
            self._lock.release()

    def _drop_outdated(self) -> None:
        """Remove code of other sources, and what cannot be read.  The index says which sources code
        is of, and is written before the code: on a full disk it would be left with what was there
        before.

        Raises:
            OSError: a file cannot be removed.
        """
        try:
            is_known = bool(self._cache_file._load_index())  # type: ignore[no-untyped-call]
        except Exception:  # as of what was cut short
            is_known = False
            Path(self._cache_file._index_path).unlink(missing_ok=True)
        if not is_known:
            for path in Path(self._cache_path).glob(f"{self._impl.filename_base}.*.nbc"):
                path.unlink(missing_ok=True)

    def _find(self, sig: Any, target_context: Any) -> Any:
        """The code of a signature; ``None`` if there is none, or none that can be read, as after a
        crash of the machine, or where it belongs to somebody else."""
        try:
            return self._read(sig, target_context)
        except Exception as error:
            _warn(f"compiled code in {self._cache_path} cannot be read: {error!r}")
            return None

    def _read(self, sig: Any, target_context: Any) -> Any:
        found = super()._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        baseline = _baseline_of(*target_context.codegen().magic_tuple())
        if found is None and self._takes_baseline and baseline is not None:
            key = self._index_key(sig, baseline)  # type: ignore[no-untyped-call]
            data = self._cache_file.load(key)  # type: ignore[no-untyped-call]
            found = None if data is None else self._impl.rebuild(target_context, data)
        return found


def _baseline_of(triple: str, _name: str, features: str) -> _Baseline | None:
    """The baseline whose code this target can run, if there is one."""
    architecture = triple.split("-")[0]
    if architecture not in BASELINES:
        return None
    name, needed = BASELINES[architecture]
    return _Baseline(triple, name) if needed <= {*features.split(",")} else None


def keep_compiled(function: Any, *, takes_baseline: bool) -> None:
    """Load ``function``, compiled by numba, from the cache, and store it there, if there is a
    directory for it."""
    try:
        function._cache = KernelCache(function.py_func, takes_baseline=takes_baseline)
    except RuntimeError:  # numba finds no place
        _warn("compiled code is not kept: set NUMBA_CACHE_DIR to a writable directory")


@cache
def _warn(told: str) -> None:
    """Warn once, not for each function."""
    logger.warning(told)
