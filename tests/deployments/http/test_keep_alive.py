"""Signs of life come in silences, and end with their stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message, Send

from deployments.deadline import MAX_UNREAD_S
from deployments.http.keep_alive import COMMENT, KeepAlive

HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}
INTERVAL_S = 0.01


class Client:
    """Takes what is sent while it ``is_reading``, one message at a time.

    Attributes:
        messages: what it took.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._is_sent_to = False
        self.is_reading = asyncio.Event()
        self.is_reading.set()

    async def send(self, message: Message) -> None:
        assert not self._is_sent_to
        self._is_sent_to = True
        await self.is_reading.wait()
        self._is_sent_to = False
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [item["body"] for item in self.messages[1:]]


def keep_alive(send: Send, interval_s: float | None = INTERVAL_S) -> KeepAlive:
    return KeepAlive(send, HEAD, COMMENT, interval_s, asyncio.timeout(None))


async def until_signs(client: Client, number: int) -> None:
    while client.bodies.count(COMMENT) < number:
        await asyncio.sleep(INTERVAL_S)


def test_the_head_is_sent_once() -> None:
    async def ask() -> Client:
        client = Client()
        with keep_alive(client.send) as sending:
            assert not sending.has_begun
            await until_signs(client, 2)
            assert sending.has_begun
            await sending.send(b"a")
            await sending.send(b"", is_last=True)
        return client

    found = asyncio.run(ask())
    assert found.messages[0] is HEAD
    assert found.messages.count(HEAD) == 1
    assert found.bodies[:2] == [COMMENT, COMMENT]
    assert found.bodies[-2:] == [b"a", b""]
    assert [item["more_body"] for item in found.messages[-2:]] == [True, False]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_nothing_is_left_behind(is_cancelled: bool) -> None:
    """No task and no timer, also where the stream ended while a sign was on its way."""

    async def ask() -> tuple[Client, int]:
        client = Client()
        with (
            suppress(KeyError),
            keep_alive(client.send),
        ):
            await until_signs(client, 1)
            if is_cancelled:
                client.is_reading.clear()
                while len(asyncio.all_tasks()) == 1:
                    await asyncio.sleep(INTERVAL_S)
                raise KeyError
        await asyncio.sleep(0)
        client.is_reading.set()
        num_sent, num_tasks = len(client.messages), len(asyncio.all_tasks())
        await asyncio.sleep(5 * INTERVAL_S)
        assert len(client.messages) == num_sent
        return client, num_tasks

    client, num_tasks = asyncio.run(ask())
    assert client.bodies[0] == COMMENT
    assert num_tasks == 1


def test_parts_are_not_mixed_with_signs() -> None:
    """While the client has not read a part there is no sign, and one that it has not read yet goes
    before the next part."""

    async def ask() -> Client:
        client = Client()
        with keep_alive(client.send) as sending:
            client.is_reading.clear()
            part = asyncio.create_task(sending.send(b"a"))
            await asyncio.sleep(5 * INTERVAL_S)
            assert len(asyncio.all_tasks()) == 2
            client.is_reading.set()
            await part
            client.is_reading.clear()
            while len(asyncio.all_tasks()) == 1:
                await asyncio.sleep(INTERVAL_S)
            part = asyncio.create_task(sending.send(b"b"))
            await asyncio.sleep(0)
            client.is_reading.set()
            await part
        return client

    found = asyncio.run(ask())
    assert found.messages[0] is HEAD
    assert found.bodies == [b"a", COMMENT, b"b"]


def test_there_may_be_none() -> None:
    async def ask() -> Client:
        client = Client()
        with keep_alive(client.send, None) as sending:
            await sending.send(b"a", is_last=True)
        return client

    assert asyncio.run(ask()).bodies == [b"a"]


def test_a_client_that_cannot_be_told_ends_the_stream() -> None:
    """What fails is raised where the next part is sent."""

    async def lost(_message: Message) -> None:
        raise OSError("gone")

    async def ask() -> None:
        with keep_alive(lost) as sending:
            while not sending.has_begun:
                await asyncio.sleep(INTERVAL_S)
            await sending.send(b"a")

    with pytest.raises(OSError, match="gone"):
        asyncio.run(ask())


@pytest.mark.parametrize(("share", "is_cut"), [(0.6, False), (1.1, True)])
def test_the_time_to_read_is_that_of_a_piece(share: float, is_cut: bool) -> None:
    """A long part may take longer, and then is not mixed with signs."""
    skipped_s = 0.0

    async def ask() -> Client:
        client, loop, limit = Client(), asyncio.get_running_loop(), asyncio.timeout(None)
        time = loop.time
        loop.time = lambda: time() + skipped_s  # type: ignore[method-assign]

        async def send(message: Message) -> None:
            nonlocal skipped_s
            skipped_s += share * MAX_UNREAD_S
            for _ in range(3):
                await asyncio.sleep(0)
            await client.send(message)

        with KeepAlive(send, HEAD, COMMENT, INTERVAL_S, limit) as sending:
            async with limit:
                await sending.send(bytes(5 * 2**16))
        return client

    if is_cut:
        with pytest.raises(TimeoutError):
            asyncio.run(ask())
        return
    found = asyncio.run(ask())
    assert found.bodies == [bytes(2**16)] * 5
    assert all(message["more_body"] for message in found.messages[1:])
