"""Streams of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deployments.deadline import Deadline
from deployments.http.keep_alive import KeepAlive
from hdserve.errors import HdserveError

EVENT_STREAM = "text/event-stream"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Nginx, which would keep events back, passes them on as they come."""


class EventStream(StreamingResponse):
    """Events that end soon after ``deadline``, also where nobody reads them: a server waits with
    what is sent for a client that has not read what was sent before, here for
    :data:`~deployments.deadline.MAX_UNREAD_S` at most.

    Status and headers are sent with the first events or the first sign of life.  What is raised
    before is answered with its own status, unless it is one of ``told_errors``.

    Args:
        events: as they are sent, some at a time.
        write_error: what is sent instead of the events that have not come.
        sign: of life, as :class:`~deployments.http.keep_alive.KeepAlive` sends it.
        interval_s: how long nothing is sent before it is.
        told_errors: errors that are events though nothing was sent before.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        write_error: Callable[[HdserveError], Awaitable[bytes]],
        deadline: Deadline,
        *,
        sign: bytes,
        interval_s: float | None,
        told_errors: tuple[type[HdserveError], ...] = (),
    ) -> None:
        super().__init__(events, media_type=EVENT_STREAM, headers=_HEADERS)
        self._events = events
        self._write_error = write_error
        self._deadline = deadline
        self._sign = sign
        self._interval_s = interval_s
        self._told_errors = told_errors
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            HdserveError: nothing was sent before.
            ClientDisconnect: the client was gone before anything was sent.
        """
        await super().__call__(scope, receive, send)
        if not self._has_begun:
            raise ClientDisconnect

    async def stream_response(self, send: Send) -> None:
        """Send the events.  Without their end, where they were not read in time: the connection is
        closed then."""
        head = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        limit = self._deadline.reading_limit()
        with KeepAlive(send, head, self._sign, self._interval_s, limit) as sending:
            try:
                async with limit, aclosing(self._events):
                    await self._send_events(sending)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                if not sending.has_begun:
                    raise self._deadline.error from error
            finally:
                self._has_begun = sending.has_begun

    async def _send_events(self, sending: KeepAlive) -> None:
        try:
            async for events in self._events:
                await sending.send(events)
        except HdserveError as error:
            if not (sending.has_begun or isinstance(error, self._told_errors)):
                raise
            await sending.send(await self._write_error(error))
        await sending.send(b"", is_last=True)
