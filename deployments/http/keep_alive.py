"""Signs of life in streams of which nothing comes for a while."""

from __future__ import annotations

import asyncio
import math
from typing import Self

from starlette.types import Message, Send

from deployments.deadline import MAX_UNREAD_S
from deployments.events import named_event
from deployments.http.body_messages import body_messages

COMMENT = b": keep-alive\n\n"
"""What clients of server-sent events read and forget."""

PING = named_event({"type": "ping"})
"""What the Messages API has instead."""

SIGNS = frozenset({COMMENT, PING})


class KeepAlive:
    """Sends the parts of one stream, and a sign of life whenever none was sent for ``interval_s``,
    so that neither the client nor a proxy takes the connection for dead.  Status and headers go
    before the first of either.  A client that takes next to nothing for
    :data:`~deployments.deadline.MAX_UNREAD_S` is not waited for any longer: what it does not read
    gathers in the replica.

    A stream has one timer, which looks when the last part was sent and is set anew only when it
    has rung, and a task only while a sign is on its way.

    Args:
        head: the message with status and headers.
        interval_s: ``None`` sends no signs.
        limit: ends the stream, now, if its client does not read.

    Attributes:
        has_begun: whether status and headers were sent.
    """

    def __init__(
        self,
        send: Send,
        head: Message,
        sign: bytes,
        interval_s: float | None,
        limit: asyncio.Timeout,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._head = head
        self._sign = sign
        self._interval_s = math.inf if interval_s is None else interval_s
        self._limit = limit
        self._last_s = self._loop.time()
        self._is_sending = False
        self._signing: asyncio.Task[None] | None = None
        self.has_begun = False

    def __enter__(self) -> Self:
        self._look_in(self._interval_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._signing is not None:
            self._signing.cancel()

    async def send(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a part, behind a sign that is on its way."""
        if self._signing is not None:
            await self._signing
        await self._write(body, is_last=is_last)

    async def _write(self, body: bytes, *, is_last: bool = False) -> None:
        self._is_sending, self._last_s = True, self._loop.time()
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._head)
        for message in body_messages(body, is_last=is_last):
            self._last_s = self._loop.time()
            await self._send(message)
        self._is_sending, self._last_s = False, self._loop.time()

    def _look_in(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(min(delay_s, MAX_UNREAD_S), self._look)

    def _look(self) -> None:
        """Begin with a sign if it is time for one, which it is not where the client has yet to read
        what it was sent; if it has had to for long, end the stream."""
        now_s = self._loop.time()
        passed_s = now_s - self._last_s
        if self._is_sending:
            if passed_s >= MAX_UNREAD_S:
                self._limit.reschedule(now_s)
            else:
                self._look_in(min(self._interval_s, MAX_UNREAD_S - passed_s))
        elif passed_s >= self._interval_s:
            self._signing = self._loop.create_task(self._give_sign())
        else:
            self._look_in(self._interval_s - passed_s)

    async def _give_sign(self) -> None:
        self._look_in(self._interval_s)
        await self._write(self._sign)
        self._signing = None
