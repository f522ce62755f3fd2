"""Signing in to the gateway: its state, its documentation and its page are open to all."""

from __future__ import annotations

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.error_answer import error_answer
from deployments.http.own_path import own_path, without_slashes
from hdserve.access import Identity
from hdserve.current_access import CurrentAccess
from hdserve.errors import Forbidden, Unauthorized

_OPEN_PATHS = frozenset(
    {
        "/",
        "/docs",
        "/health",
        "/metrics",
        "/openapi.json",
        "/playground",
        "/ready",
        "/redoc",
        "/version",
    }
)
DOCS_FILES = "/docs/files"
"""Where the files are that ``/docs`` and ``/redoc`` load."""

_OPEN_PREFIXES = ("/page/", f"{DOCS_FILES}/")


class SignIn:
    """ASGI middleware: identifies the sender of a request before any of its body is read."""

    def __init__(self, app: ASGIApp, access: CurrentAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(own_path(scope)):
            await self._app(scope, receive, send)
            return
        try:
            identity = self._access.identify(authorization_of(scope))
        except Unauthorized as error:
            response = error_answer(scope, error, headers={"www-authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["identity"] = identity
        await self._app(scope, receive, send)


def authorization_of(scope: Scope) -> str:
    """Return the header that identifies the sender of a request: ``authorization`` with a bearer
    key, else the equivalent for the key in ``x-api-key``, as in Anthropic's API; empty if there is
    neither."""
    headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
    found: str = headers.get(b"authorization", "")
    scheme, _, own_key = found.partition(" ")
    key = headers.get(b"x-api-key", "")
    return f"Bearer {key}" if key and not (scheme.lower() == "bearer" and own_key) else found


def identity_of(request: Request) -> Identity:
    """Return who sent ``request``, as determined by :class:`SignIn`."""
    identity: Identity = request.state.identity
    return identity


def require_admin(request: Request) -> None:
    """Check that the administrator sent ``request``.

    Raises:
        Forbidden: the request was not sent with the key of the administrator.
    """
    if not identity_of(request).is_admin:
        raise Forbidden(
            "this needs the key of the administrator (access.admin_key, admin_key_file)"
        )


def is_open(path: str) -> bool:
    """Whether a path, or the path it redirects to, is open to everybody."""
    return without_slashes(path) in _OPEN_PATHS or path.startswith(_OPEN_PREFIXES)
