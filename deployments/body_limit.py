"""Refusing request bodies that are too large, however they are sent."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.responses import error_body
from hdserve.errors import BodyTooLarge


class BodyLimit:
    """ASGI middleware: a body of more than ``max_bytes`` is answered with 413.

    The declared length is checked first, then what really arrives.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(self._declared_bytes(scope))
            await self._app(scope, self._counting(receive), send)
        except BodyTooLarge as error:
            response = JSONResponse(error_body(error), status_code=error.status)
            await response(scope, receive, send)

    def _counting(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        return counted

    def _declared_bytes(self, scope: Scope) -> int:
        values = [value for name, value in scope["headers"] if name == b"content-length"]
        return int(values[0]) if values and values[0].isdigit() else 0

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(f"the request body is over the limit of {self._max_bytes} bytes")
