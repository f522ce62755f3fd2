"""Running work off the event loop that is large enough to hold it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

MAX_INLINE_SIZE = 4096
"""Work on more bytes of a request, or more characters or tokens of a text, runs in a thread:
tokenizing 1 MB takes seconds, in which no stream would continue."""

MAX_SHARED_SIZE = 1 << 18
"""Larger work is done one piece at a time: a few requests of 4 MB would occupy every thread for
seconds, and smaller ones would wait."""

_NUM_WAITING = 4
"""Threads for what administrators ask for."""


async def off_loop(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of ``function``, which runs in a thread if ``size`` says that it may take
    long."""
    if size <= MAX_INLINE_SIZE:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


class OffLoop:
    """Like :func:`off_loop`, for work on what clients send: large work has a thread of its own, so
    that other work never waits for it, and what administrators ask for has some of its own."""

    def __init__(self) -> None:
        self._one_large = ThreadPoolExecutor(1, "hdserve-large-work")
        self._waiting = ThreadPoolExecutor(_NUM_WAITING, "hdserve-administration")

    async def __call__(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``function``, see :func:`off_loop`."""
        if size <= MAX_SHARED_SIZE:
            return await off_loop(size, function, *arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._one_large, function, *arguments)

    async def waiting(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``function``, which may wait minutes for the cluster, or without end
        for a disk, even after its caller has given up.  Only calls of this method wait for it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._waiting, function, *arguments)
