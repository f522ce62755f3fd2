"""Refusing request bodies that are too large or arrive too slowly, however they are sent."""

from __future__ import annotations

import asyncio
import time

from ray.exceptions import TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.errors import refusal
from hdserve.access import Identity
from hdserve.config import GatewayConfig
from hdserve.errors import BodyTooLarge, BodyTooSlow, RequestTimeout

MAX_SILENCE_S = 30.0
"""How long a client may send nothing while its body is being waited for."""

MIN_BYTES_PER_S = 1024
"""How much of a body must arrive per second, after an allowance of :data:`MAX_SILENCE_S` in all: a
client that sends a byte now and then would keep its slot for days."""


class BodyLimit:
    """ASGI middleware: a body of more than ``max_body_bytes`` is answered with 413, and one that
    :func:`paced` gives up on, as each occupies a slot of a gateway, with 408.  One that
    there was no room for, as :class:`~deployments.http.early_limit.EarlyLimit` says, is not read.

    The declared length is checked first, then the actual one.  Archives of the administrator, which
    are read piece by piece, have a separate limit.
    """

    def __init__(self, app: ASGIApp, limits: GatewayConfig) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.get("state", {})
        identity = state.get("identity")
        max_bytes = max_bytes_of(scope, self._limits, identity)
        reason = (
            f"the request body is over the limit of {max_bytes} bytes, which is "
            f"gateway.{_limit_name(scope, identity)} of the server's configuration"
        )
        try:
            _check(self._declared_bytes(scope), max_bytes, reason)
            if "body_error" in state:
                raise state["body_error"]
            await self._app(scope, self._counting(paced(receive), max_bytes, reason), send)
        except (BodyTooLarge, RequestTimeout) as error:
            await refusal(scope, error)(scope, receive, send)

    def _counting(self, receive: Receive, max_bytes: int, reason: str) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            try:
                message = await receive()
            except TaskCancelledError:  # Ray's proxy reports that the client is gone
                return {"type": "http.disconnect"}
            num_bytes += len(message.get("body", b""))
            _check(num_bytes, max_bytes, reason)
            return message

        return counted

    def _declared_bytes(self, scope: Scope) -> int:
        values = [value for name, value in scope["headers"] if name == b"content-length"]
        return int(values[0]) if values and values[0].isdigit() else 0


def max_bytes_of(scope: Scope, limits: GatewayConfig, identity: Identity | None) -> int:
    """Return how many bytes the body of a request may have."""
    found: int = getattr(limits, _limit_name(scope, identity))
    return found


def _limit_name(scope: Scope, identity: Identity | None) -> str:
    is_import = scope["path"].endswith("/import") and identity and identity.is_admin
    return "max_import_bytes" if is_import else "max_body_bytes"


def _check(num_bytes: int, max_bytes: int, reason: str) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(reason)


def paced(receive: Receive) -> Receive:
    """Return a ``receive`` that limits how long a body may take; later messages are not limited.

    Only waiting for the body counts: handling the pieces of an archive may take long, and so may
    the answer after the last piece.  Make one for each request.

    Raises:
        BodyTooSlow: (by the returned function) the client is silent, or sends too slowly.
    """
    left_s = MAX_SILENCE_S
    has_more = True

    async def received() -> Message:
        nonlocal left_s, has_more
        if not has_more:
            return await receive()
        start_s = time.monotonic()
        message = await _next(receive, min(left_s, MAX_SILENCE_S))
        has_more = message.get("more_body", False)
        left_s += len(message.get("body", b"")) / MIN_BYTES_PER_S - (time.monotonic() - start_s)
        return message

    return received


async def _next(receive: Receive, timeout_s: float) -> Message:
    """Return the next message.

    Raises:
        BodyTooSlow: none arrived in this time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await receive()
    except TimeoutError as error:
        reason = (
            f"the request body came too slowly: nothing for {MAX_SILENCE_S:g} s, "
            f"or less than {MIN_BYTES_PER_S} bytes a second"
        )
        raise BodyTooSlow(reason) from error
