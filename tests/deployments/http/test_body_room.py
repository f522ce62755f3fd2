"""Bodies take no more memory in a gateway than there is room for, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from deployments.http.body_room import MAX_FREE_BYTES, BodyRoom

ROOM = 10 * MAX_FREE_BYTES


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Requests:
    """Requests with bodies, which end when they are told to."""

    def __init__(self) -> None:
        self.room = BodyRoom(ROOM)
        self.held: list[int] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def begin(self, *sizes: int) -> None:
        for size in sizes:
            self._tasks[size] = asyncio.create_task(self._hold(size))
        await turns()

    async def _hold(self, size: int) -> None:
        async with self.room.held(size):
            self.held.append(size)
            try:
                await asyncio.Event().wait()
            finally:
                self.held.remove(size)

    async def end(self, size: int) -> None:
        self._tasks.pop(size).cancel()
        await turns()


def run(test: Callable[[Requests], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(10):
            await test(Requests())

    asyncio.run(all_of_it())


def test_requests_wait_in_their_order() -> None:
    """Also one that would fit: else a large one might wait for ever."""

    async def test(requests: Requests) -> None:
        await requests.begin(ROOM // 2, ROOM // 2 + 1, ROOM // 4)
        assert requests.held == [ROOM // 2]
        await requests.end(ROOM // 2)
        assert requests.held == [ROOM // 2 + 1, ROOM // 4]

    run(test)


@pytest.mark.parametrize("size", [ROOM, ROOM + 1, 100 * ROOM])
def test_the_largest_are_alone(size: int) -> None:
    """Nothing is too large."""

    async def test(requests: Requests) -> None:
        await requests.begin(ROOM // 2, size, ROOM // 3)
        assert requests.held == [ROOM // 2]
        await requests.end(ROOM // 2)
        assert requests.held == [size]
        await requests.end(size)
        assert requests.held == [ROOM // 3]

    run(test)


def test_short_bodies_do_not_wait() -> None:
    async def test(requests: Requests) -> None:
        await requests.begin(ROOM, MAX_FREE_BYTES + 1, MAX_FREE_BYTES, 0)
        assert requests.held == [ROOM, MAX_FREE_BYTES, 0]
        await requests.end(MAX_FREE_BYTES)
        assert requests.held == [ROOM, 0]

    run(test)


def test_a_request_that_ends_while_it_waits_takes_nothing() -> None:
    """Whether it is the next one or waits behind it."""

    async def test(requests: Requests) -> None:
        await requests.begin(ROOM, ROOM - 1, ROOM - 2, ROOM - 3)
        await requests.end(ROOM - 1)
        await requests.end(ROOM - 3)
        await requests.end(ROOM)
        assert requests.held == [ROOM - 2]
        await requests.end(ROOM - 2)
        await requests.begin(ROOM)
        assert requests.held == [ROOM]

    run(test)
