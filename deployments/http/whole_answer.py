"""Whole answers in JSON, sent no faster than they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deployments.deadline import MAX_UNREAD_S, Deadline
from deployments.http.body_messages import body_messages


class WholeAnswer(Response):
    """An answer that is being sent until its client has read nearly all of it.  Sent at once, what
    is not read would stay in the buffers of the server, where no limit counts it.

    An answer of which next to nothing is read for long, or that is not read soon after
    ``deadline``, is left without its end: the connection is closed then.

    Args:
        body: JSON.
    """

    def __init__(
        self, body: bytes, deadline: Deadline, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(body, headers=dict(headers), media_type="application/json")
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        with suppress(TimeoutError):
            async with self._deadline.reading_limit():
                for message in self._messages():
                    async with asyncio.timeout(MAX_UNREAD_S):
                        await send(message)

    def _messages(self) -> Iterator[Message]:
        """Yield the head and the pieces.  The head may have to wait, too: for an answer before it
        on the connection."""
        yield {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        yield from body_messages(bytes(self.body))
