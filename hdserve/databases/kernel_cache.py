"""Where compiled functions are kept between runs, and when they are out of date.

numba keeps a compiled function until the file it stands in changes.  Here functions of several
modules are compiled into one, and a stale one reads wrong addresses, so all modules count that are
compiled together: after any change to one of them everything of theirs is compiled once more.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching

_COMPILED_TOGETHER = ("databases", "drafting")


@cache
def sources_digest(folder: Path) -> str:
    """A digest of the modules that those in ``folder`` are compiled with."""
    folders = [folder]
    if folder.name in _COMPILED_TOGETHER:
        folders = [folder.parent / name for name in _COMPILED_TOGETHER]
    digest = hashlib.sha256()
    for path in sorted(path for each in folders for path in each.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _StampedByAll:
    _py_file: str

    def get_source_stamp(self) -> str:
        return sources_digest(Path(self._py_file).parent)


class _Provided(_StampedByAll, caching.UserProvidedCacheLocator):
    """``NUMBA_CACHE_DIR``."""


class _InTree(_StampedByAll, caching.InTreeCacheLocator):
    """``__pycache__`` beside the source."""


class _UserWide(_StampedByAll, caching.UserWideCacheLocator):
    """The user's cache directory, where the source's cannot be written to."""


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Provided, _InTree, _UserWide]  # noqa: RUF012 - as in the base class


class KernelCache(caching.FunctionCache):
    """The cache of one compiled function."""

    _impl_class = _Implementation


def keep_compiled(function: Any) -> None:
    """Load ``function``, compiled by numba, from the cache, and keep it there."""
    function._cache = KernelCache(function.py_func)  # type: ignore[no-untyped-call]
