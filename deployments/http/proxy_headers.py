"""Headers that clients may not send to Ray Serve.

Its proxies, and gateways behind HAProxy, obey headers that are not documented here.  One cuts an
answer off with a status and a text that no client of the API expects, and may take the next request
of the connection with it; another lets the answer of a client that is gone go on; and each model id
that a third one names is remembered for ever.  They also fail if a header is not valid
UTF-8.
"""

from __future__ import annotations

from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
)
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.early_limit import EarlyLimit


def _spelled(name: bytes) -> bytes:
    """Return the form in which Ray Serve, and proxies before it, treat header names as equal."""
    return name.lower().replace(b"-", b"_")


_DROPPED = frozenset(
    _spelled(name.encode())
    for name in (
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        SERVE_MULTIPLEXED_MODEL_ID,
    )
)

_REQUEST_ID = SERVE_HTTP_REQUEST_ID_HEADER.encode()


def middlewares() -> list[Middleware]:
    """Return the middlewares of Ray Serve's processes, which call this if their environment says so
    (:data:`hdserve.config.deployed.PROXY_VARIABLES`)."""
    return [Middleware(EarlyLimit), Middleware(ProxyHeaders)]


class ProxyHeaders:
    """Removes the headers that Ray Serve would obey, and an empty request id, which it would not
    replace; escapes bytes that are not UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            scope["headers"] = [
                (name, _readable(value))
                for name, value in scope["headers"]
                if _spelled(name) not in _DROPPED and (value or name != _REQUEST_ID)
            ]
        await self._app(scope, receive, send)


def _readable(value: bytes) -> bytes:
    return value if value.isascii() else value.decode(errors="backslashreplace").encode()
