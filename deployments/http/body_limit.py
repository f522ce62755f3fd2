"""Refusing request bodies that are too large or arrive too slowly, however they are sent."""

from __future__ import annotations

from ray.exceptions import TaskCancelledError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.body_pace import paced
from deployments.http.error_answer import error_answer
from hdserve.access import Identity
from hdserve.config import GatewayConfig
from hdserve.errors import BodyTooLarge


class BodyLimit:
    """ASGI middleware: a body of more than ``max_body_bytes`` is answered with 413, and one that
    :func:`~deployments.http.body_pace.paced` gives up on with 408.

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
        identity = scope.get("state", {}).get("identity")
        max_bytes = max_bytes_of(scope, self._limits, identity)
        try:
            _check(self._declared_bytes(scope), max_bytes)
            await self._app(scope, self._counting(paced(receive), max_bytes), send)
        except BodyTooLarge as error:
            await error_answer(scope, error)(scope, receive, send)

    def _counting(self, receive: Receive, max_bytes: int) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            try:
                message = await receive()
            except TaskCancelledError:  # Ray's proxy reports that the client is gone
                return {"type": "http.disconnect"}
            num_bytes += len(message.get("body", b""))
            _check(num_bytes, max_bytes)
            return message

        return counted

    def _declared_bytes(self, scope: Scope) -> int:
        values = [value for name, value in scope["headers"] if name == b"content-length"]
        return int(values[0]) if values and values[0].isdigit() else 0


def max_bytes_of(scope: Scope, limits: GatewayConfig, identity: Identity | None) -> int:
    """Return how many bytes the body of a request may have."""
    is_import = scope["path"].endswith("/import") and identity and identity.is_admin
    return limits.max_import_bytes if is_import else limits.max_body_bytes


def _check(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLarge(f"the request body is over the limit of {max_bytes} bytes")
