"""The names that clients call the server by.

A web page may let its own name lead to this server (DNS rebinding).  To the browser, the server's
answers are then the page's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.error_answer import error_answer
from hdserve.errors import Forbidden

_MAX_SHOWN_CHARACTERS = 100


def allow_hosts(api: FastAPI, names: Collection[str] | None) -> None:
    """Let clients call ``api`` by local names and ``names`` only; by any if that is ``None``, or if
    ``*`` is among them."""
    if names is not None and "*" not in names:
        api.add_middleware(AllowedHosts, names=names)


class AllowedHosts:
    """ASGI middleware: a request by a name that is neither local nor among ``names`` is answered
    with 403.

    An address is a page's own only if the page comes from there.  Browsers always send a ``host``;
    HAProxy's checks have none.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = _names_of(scope) if scope["type"] == "http" else []
        wrong = next((n for n in names if not (n in self._names or _is_local(n))), None)
        if wrong is None:
            await self._app(scope, receive, send)
            return
        response = error_answer(scope, _refusal(wrong))
        await response(scope, receive, send)


def _names_of(scope: Scope) -> list[str]:
    """Return the names or addresses that a request calls the server by, in lower case and without
    port: one, or none if it has no ``host``."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return [re.sub(r":\d*$", "", host).lower().removesuffix(".") for host in hosts if host]


def _is_local(name: str) -> bool:
    """Whether ``name`` is an address, or one that browsers look for on their own machine only."""
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def _refusal(name: str) -> Forbidden:
    return Forbidden(
        f"the server is not to be called {name[:_MAX_SHOWN_CHARACTERS]!r}: gateway.allowed_hosts "
        "of its configuration does not list this name"
    )
