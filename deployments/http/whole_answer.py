"""Whole answers in JSON, sent no faster than they are read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.deadline import Deadline
from deployments.http.unread_limit import as_read


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
                await super().__call__(scope, receive, as_read(send))
