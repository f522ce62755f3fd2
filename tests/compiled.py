"""Parts of compiled code, called from Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numba

from hdserve.databases.compiled import OPTIONS


@cache
def called(part: Callable[..., Any]) -> Callable[..., Any]:
    """An entry point that is nothing but ``part``, which Python itself cannot call."""
    return cast("Callable[..., Any]", numba.njit(**OPTIONS)(lambda *arguments: part(*arguments)))
