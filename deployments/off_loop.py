"""Work of a size that may hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_INLINE_SIZE = 4096
"""Work on more bytes of a request, or more characters or tokens of a text, runs in a thread.  To
make the tokens of 1 MB takes seconds, in which no stream would go on."""


async def off_loop(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """The result of ``function``, which runs in a thread when ``size`` says it may take long."""
    if size <= _MAX_INLINE_SIZE:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)
