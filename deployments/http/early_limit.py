"""Keeping bodies out of memory that will never be read, or that there is no room for yet."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.access import authorization_of
from deployments.http.body_limit import max_bytes_of
from deployments.http.body_room import HeldRoom
from hdserve.current_access import CurrentAccess
from hdserve.errors import RequestTimeout, Unauthorized

if TYPE_CHECKING:
    from deployments.gateway import Gateway

_PIECE_BYTES = 16 * 2**10
"""Smaller pieces are joined: each takes some hundred bytes more than its content."""


def _gateway_of_process() -> Gateway | None:
    """Return the gateway of this process; ``None`` in a proxy of Ray Serve, in processes of other
    applications, and while the gateway is being made."""
    try:
        found: Any = serve.get_replica_context().servable_object
    except RayServeException:
        return None
    is_gateway = isinstance(getattr(found, "access", None), CurrentAccess)
    return found if is_gateway else None


class EarlyLimit:
    """ASGI middleware in front of Ray Serve's own code in a gateway: discards what exceeds the
    limit of a body, and reads none of a long one while the gateway has no room for it, so that the
    client cannot send it.

    Ray Serve reads bodies as fast as they arrive and keeps them, also those of requests that wait
    for a slot.  So :class:`~deployments.http.body_limit.BodyLimit`, which reports the same limit to
    the client, would be too late.  If a required key is missing only the first piece is kept.

    Tells the application when the request arrived and, for ``BodyLimit`` to answer, that there was
    no room for its body by its deadline; of that body only the first piece is kept.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = _gateway_of_process() if scope["type"] == "http" else None
        if gateway is None:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["arrived_s"] = time.monotonic()
        max_bytes = _max_bytes(gateway, scope)
        needed_bytes = _needed_bytes(gateway, scope, max_bytes)
        async with AsyncExitStack() as stack:
            room = gateway.body_room
            try:
                entering = stack.enter_async_context(room.held(needed_bytes))
                held = await gateway.deadline().wait(entering)
            except RequestTimeout:
                state["body_error"] = _no_room(gateway)
                max_bytes, held = 0, await stack.enter_async_context(room.held(0))
            await self._app(scope, _limited(receive, max_bytes, held), send)


def _max_bytes(gateway: Gateway, scope: Scope) -> int:
    try:
        identity = gateway.access.identify(authorization_of(scope))
    except Unauthorized:
        return 0
    return max_bytes_of(scope, gateway.config.gateway, identity)


def _no_room(gateway: Gateway) -> RequestTimeout:
    limit_s = gateway.config.gateway.request_timeout_s
    return RequestTimeout(
        f"the server had no room for the body of the request in {limit_s:g} s "
        "(gateway.request_timeout_s, gateway.max_held_body_bytes)"
    )


def _needed_bytes(gateway: Gateway, scope: Scope, max_bytes: int) -> int:
    """Return how much of a body will be kept at most: no more than was declared, and of an archive,
    which is read piece by piece, no more than of others."""
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"")
    is_open = b"transfer-encoding" in headers
    num_bytes = int(declared) if declared.isdigit() else max_bytes if is_open else 0
    return min(num_bytes, max_bytes, gateway.config.gateway.max_body_bytes)


def _limited(receive: Receive, max_bytes: int, room: HeldRoom) -> Receive:
    """Return a ``receive`` that passes on the pieces up to the first one beyond the limit, which
    :class:`~deployments.http.body_limit.BodyLimit` needs to see, and the end, from when on
    ``room`` is that of what there was."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        piece = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body = message.get("body", b"")
            piece += body if num_bytes <= max_bytes else b""
            num_bytes += len(body)
            has_more = message.get("more_body", False)
            if not has_more:
                room.keep(num_bytes)
            is_enough = len(piece) >= _PIECE_BYTES or (piece and num_bytes > max_bytes)
            if is_enough or not has_more:
                return {"type": "http.request", "body": bytes(piece), "more_body": has_more}

    return limited
