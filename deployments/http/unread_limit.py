"""Ending answers that are not read: each would keep a place of the gateway for as long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.deadline import MAX_UNREAD_S
from deployments.http.body_messages import body_messages


class UnreadLimit:
    """ASGI middleware: an answer of which next to nothing is read for long is left without its end;
    the connection is closed then."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(TimeoutError):
            await self._app(scope, receive, as_read(send))


def as_read(send: Send) -> Send:
    """Return a ``send`` that waits until the client has read nearly all that was sent before, of
    the head, too: an answer before it on the connection may be unread.  It raises ``TimeoutError``
    where next to nothing is read for :data:`~deployments.deadline.MAX_UNREAD_S`."""

    async def send_as_read(message: Message) -> None:
        for piece in _pieces(message):
            async with asyncio.timeout(MAX_UNREAD_S):
                await send(piece)

    return send_as_read


def _pieces(message: Message) -> Iterable[Message]:
    if message["type"] != "http.response.body":
        return [message]
    return body_messages(message.get("body", b""), is_last=not message.get("more_body", False))
