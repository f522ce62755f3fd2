"""How the kernels of drafting and of its databases are compiled, and parts of all kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba

from hdserve.databases.kernel_cache import keep_compiled

OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Options of numba.  Without reference counts (``_nrt``) a function may not allocate or return
arrays; measured on drafting, they made calls three times slower (docs/adr/0012)."""

_PART: Final[dict[str, Any]] = OPTIONS | {
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
"""Options of what is only inlined.  Functions for callers in Python and C, each with all the code
once more, would take a third of the time in which kernels are compiled (docs/adr/0012)."""

_F = TypeVar("_F", bound=Callable[..., Any])


def jit(function: _F) -> _F:
    """Compile an entry point: cached on disk, without the GIL, without reference counting."""
    compiled = numba.njit(**OPTIONS, fastmath=True)(function)
    keep_compiled(compiled, takes_baseline=True)
    return cast("_F", compiled)


def fast_inlined(function: _F) -> _F:
    """Compile a part of entry points, with the options of :func:`jit`.  Python cannot call it: the
    process would crash."""
    return cast("_F", numba.njit(**_PART, fastmath=True)(function))


def strictly_inlined(function: _F) -> _F:
    """Compile a part as :func:`fast_inlined` does, but without ``fastmath``: for arithmetic on
    values that may be NaN or infinite."""
    return cast("_F", numba.njit(**_PART)(function))
