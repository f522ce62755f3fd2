"""Signs of life come in silences, and end with their stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from starlette.types import Message, Send

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
