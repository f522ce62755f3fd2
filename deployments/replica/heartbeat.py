"""Messages by which a replica shows that it is there while it has nothing to send.

They come from the event loop, not from the engine: a request may wait for a slot, and a forward
pass may take long.  An engine that hangs is found by the replica's health check.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Self

from deployments.generation import HEARTBEAT, Records


class AnswersCalls:
    """Has methods that gateways call as streams, in which they hear that the replica is there."""

    async def call(
        self, method: str, arguments: tuple[Any, ...], heartbeat_s: float
    ) -> AsyncGenerator[tuple[Any, ...]]:
        """Yield a heartbeat after each ``heartbeat_s`` in which ``method`` has not ended, then what
        it returns, in a tuple; closing the iterator cancels it."""
        working = asyncio.ensure_future(getattr(self, method)(*arguments))
        async with aclosing(beats_until(working, heartbeat_s)) as beats:
            async for beat in beats:
                yield beat
        yield (working.result(),)


class Heartbeat:
    """Calls ``beat``, while it is open, after each ``interval_s`` in which nothing was sent; never,
    if that is ``None``.  A stream has one timer, and a message costs one assignment.

    Attributes:
        is_silent: whether nothing was sent since the timer rang last; whoever sends clears it.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat = beat
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None
        self.is_silent = False

    def __enter__(self) -> Self:
        if self._interval_s is not None:
            self._timer = self._loop.call_later(self._interval_s, self._ring, self._interval_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self, interval_s: float) -> None:
        if self.is_silent:
            self._beat()
        self.is_silent = True
        self._timer = self._loop.call_later(interval_s, self._ring, interval_s)


async def beats_until(
    ended: asyncio.Future[Any], interval_s: float | None
) -> AsyncGenerator[Records]:
    """Yield a heartbeat after each ``interval_s`` until ``ended`` is done; closing the iterator
    cancels it."""
    try:
        while not (await asyncio.wait([ended], timeout=interval_s))[0]:
            yield HEARTBEAT
    finally:
        if ended.cancel():
            await asyncio.gather(ended, return_exceptions=True)
