"""A call that is cancelled ends on both sides, at whatever moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from ray import serve
from ray.serve.exceptions import RequestCancelledError

from deployments.cancelling import cancel_stream
from deployments.model_servers import ModelServers
from deployments.runtime import actor_options
from hdserve.errors import HdserveError
from tests.clusters import connected_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_TURNS = 60
WAIT_S = 20.0


class Unreadable:
    """A message that cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class Endless:
    """A server whose answers end when they are cancelled."""

    def __init__(self) -> None:
        self._num_running = 0

    async def generate(self) -> AsyncIterator[int]:
        """Nothing, for ever."""
        self._num_running += 1
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            self._num_running -= 1

    async def call(self, *_: Any) -> AsyncIterator[Any]:
        """What nobody can read, and then nothing."""
        yield Unreadable()
        async for number in self.generate():
            yield number

    async def num_running(self) -> int:
        return self._num_running


class Caller:
    """A client in a process like a gateway's."""

    def __init__(self, handle: Any) -> None:
        direct = handle.options(_by_reference=False)
        self._servers = ModelServers({"m": handle}, WAIT_S, lambda _: None)
        self._unary = direct
        self._streaming = direct.options(stream=True, response_serialization="pickle")

    async def when_assigned(self) -> list[str]:
        """Cancel in the turn of the event loop that assigns the call, with somebody waiting for
        it and without."""
        outcomes = []
        for is_awaited in (True, False):
            stream = self._streaming.generate.remote()
            stream._replica_result_future.add_done_callback(lambda _, s=stream: cancel_stream(s))
            if not is_awaited:
                await asyncio.wait([stream._replica_result_future])
            outcomes.append(await self._outcome(stream))
        return outcomes

    async def at(self, num_turns: int) -> str:
        """Cancel so many turns of the event loop after the call."""
        stream = self._streaming.generate.remote()
        reading = asyncio.create_task(self._outcome(stream))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        cancel_stream(stream)
        return await reading

    async def unread(self) -> str:
        """The error of a message that cannot be read."""
        try:
            await self._servers.call("m", "any")
        except HdserveError as error:
            return error.message
        return "none"

    async def _outcome(self, stream: Any) -> str:
        limit = asyncio.timeout(WAIT_S)
        with suppress(RequestCancelledError, asyncio.CancelledError, TimeoutError):
            async with limit:
                await anext(stream)
        return "went on" if limit.expired() else "cancelled"

    async def num_left(self) -> int:
        """How many calls the server still works for, after a while."""
        number = 0
        for _ in range(100):
            number = await self._unary.num_running.remote()
            if not number:
                break
            await asyncio.sleep(0.1)
        return number


@pytest.fixture(scope="module")
def caller() -> Iterator[Any]:
    options = actor_options(0.1, 1000)
    server = serve.deployment(max_ongoing_requests=1000, ray_actor_options=options)(Endless)
    client = serve.deployment(ray_actor_options=options)(Caller)
    with connected_cluster(2):
        try:
            serve.start(proxy_location="Disabled")
            yield serve.run(client.bind(server.bind()), route_prefix=None)
        finally:
            serve.shutdown()


def test_a_call_that_is_cancelled_when_it_is_assigned_ends(caller: Any) -> None:
    """For the client, and on the server."""
    assert caller.when_assigned.remote().result(timeout_s=4 * WAIT_S) == ["cancelled"] * 2
    assert caller.num_left.remote().result(timeout_s=WAIT_S) == 0


def test_a_call_can_be_cancelled_at_any_moment(caller: Any) -> None:
    """From before it is assigned until long after."""
    outcomes = [caller.at.remote(number) for number in range(NUM_TURNS)]
    found = {outcome.result(timeout_s=4 * WAIT_S) for outcome in outcomes}
    assert found == {"cancelled"}
    assert caller.num_left.remote().result(timeout_s=WAIT_S) == 0


def test_a_call_whose_message_cannot_be_read_ends(caller: Any) -> None:
    """As the message of another version may be."""
    assert "failed" in caller.unread.remote().result(timeout_s=4 * WAIT_S)
    assert caller.num_left.remote().result(timeout_s=WAIT_S) == 0
