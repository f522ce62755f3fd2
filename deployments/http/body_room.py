"""How much memory the bodies of requests take in a gateway, all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MAX_FREE_BYTES = 2**16
"""A body that needs no room: the HTTP server reads as much ahead of any request, so ordinary
requests need not wait until large ones have ended."""


class BodyRoom:
    """Has requests wait, in the order of their arrival, until there is room for their bodies.

    A request gets the room for its whole body before any of it is read, and before it waits for
    anything else; so those that have room never wait for those that have none.

    Args:
        num_bytes: of the bodies that may be there at a time; a larger one is alone.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_left = num_bytes
        self._turn = asyncio.Lock()
        self._is_given_back = asyncio.Event()

    @asynccontextmanager
    async def held(self, num_bytes: int) -> AsyncIterator[HeldRoom]:
        """Hold room for a body."""
        wanted = min(num_bytes, self._num_bytes) if num_bytes > MAX_FREE_BYTES else 0
        if wanted:
            await self._take(wanted)
        found = HeldRoom(self._give_back, wanted)
        try:
            yield found
        finally:
            found.keep(0)

    async def _take(self, num_bytes: int) -> None:
        async with self._turn:
            while self._num_left < num_bytes:
                self._is_given_back.clear()
                await self._is_given_back.wait()
            self._num_left -= num_bytes

    def _give_back(self, num_bytes: int) -> None:
        self._num_left += num_bytes
        self._is_given_back.set()


class HeldRoom:
    """The room of one body.

    Args:
        give_back: what is not needed.
    """

    def __init__(self, give_back: Callable[[int], None], num_bytes: int) -> None:
        self._give_back = give_back
        self._num_bytes = num_bytes

    def keep(self, num_bytes: int) -> None:
        """Keep room for ``num_bytes`` at most: the body has no more."""
        needed = num_bytes if num_bytes > MAX_FREE_BYTES else 0
        if needed < self._num_bytes:
            self._give_back(self._num_bytes - needed)
            self._num_bytes = needed
