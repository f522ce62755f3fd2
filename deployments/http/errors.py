"""How errors are answered: ours, the framework's, and unexpected ones."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

from deployments.http.error_answer import error_answer
from deployments.http.own_path import own_path, root_of, without_slashes
from hdserve.errors import (
    BodyTooSlow,
    HdserveError,
    ModelNotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
)

_METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
_PREFIX = "/v1"
_MAX_PATH_CHARACTERS = 100

UNEXPECTED = "an internal error occurred; the log of the gateway says more"
"""What a client is told of an error that is none of ours."""

RETRY_AFTER_S = 1
"""When clients that are refused for lack of room are to try again."""

CLIENT_CLOSED_REQUEST = 499
"""The status under which nginx logs a client that hung up before it was answered; no client sees
it."""


def add_error_handlers(api: FastAPI) -> None:
    """Answer our own errors, those of the framework, and unexpected ones."""
    api.add_exception_handler(HdserveError, _on_error)
    api.add_exception_handler(HTTPException, _on_http_error)
    api.add_exception_handler(ClientDisconnect, _on_disconnect)
    api.add_exception_handler(Exception, _on_unexpected)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HdserveError)
    if isinstance(error, ModelNotFound):  # perhaps its name in the path has extra slashes
        moved = _moved(request)
        if moved is not None:
            return moved
    return refusal(request.scope, error)


def refusal(scope: Scope, error: HdserveError) -> Response:
    """Return the answer of a request that ends with ``error``."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if isinstance(error, RequestTimeout):  # clients would retry it twice
        headers["x-should-retry"] = "false"
    if isinstance(error, BodyTooSlow):  # the rest of the body would be taken for a request
        headers["connection"] = "close"
    return error_answer(scope, error, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if message == HTTPStatus.NOT_FOUND.phrase:  # the framework says nothing more specific
        moved = _moved(request)
        if moved is not None:
            return moved
        message = _no_route(request, own_path(request.scope))
    headers = {**(error.headers or {})}
    if error.status_code == 405:
        allowed = _allowed_methods(request) or headers["Allow"].split(", ")
        headers["Allow"] = ", ".join(allowed)
        message = _wrong_method(request, allowed)
    told = RequestError(message)
    return error_answer(
        request.scope, told, status=error.status_code, code="invalid_route", headers=headers
    )


def _moved(request: Request) -> RedirectResponse | None:
    """Redirect to the path without extra slashes, if that differs and is served.  The location has
    neither scheme nor host: the server does not know those of a proxy in front of
    it."""
    path = own_path(request.scope)
    meant = without_slashes(path)
    if meant == path or not _is_served(request, meant):
        return None
    query = f"?{request.url.query}" if request.url.query else ""
    return RedirectResponse(f"{root_of(request.scope)}{meant}{query}")


def _no_route(request: Request, path: str) -> str:
    """Say what does not exist, and what may be meant: base URLs end in ``/v1`` or not, depending on
    whether clients add it themselves."""
    message = f"there is no route {request.method} {path[:_MAX_PATH_CHARACTERS]}"
    for meant in (_PREFIX + path, path.removeprefix(_PREFIX)):
        if meant not in ("", path) and _is_served(request, meant):
            return f"{message}; did you mean {meant[:_MAX_PATH_CHARACTERS]}?"
    return message


def _wrong_method(request: Request, allowed: Sequence[str]) -> str:
    """Say which methods the path allows."""
    *most, last = allowed
    methods = f"{', '.join(most)} or {last}" if most else last
    return f"{request.method} is not allowed here: use {methods}"


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_unexpected(request: Request, _error: Exception) -> Response:
    return error_answer(request.scope, HdserveError(UNEXPECTED))


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes of a path; Starlette names only those of the first one.
    Empty for a file, whose methods Starlette knows."""
    path = own_path(request.scope)
    found = {method for method in _METHODS if _is_served(request, path, method)}
    return sorted(found | {"HEAD"} if "GET" in found else found)


def _is_served(request: Request, path: str, method: str = "") -> bool:
    """Whether a route exists for a path and the method of ``request``, or for ``method``."""
    scope = {
        **request.scope,
        "path": root_of(request.scope) + path,
        "method": method or request.method,
    }
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.router.routes)
