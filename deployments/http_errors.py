"""What failed requests are answered with: errors in the shape of the OpenAI API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from ray.exceptions import TaskCancelledError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from deployments.openai_objects import error_body
from hdserve.errors import HdserveError, Overloaded, RequestError, RequestTimeout

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")

_CLIENT_CLOSED_REQUEST = 499
"""What nginx logs and counts of clients that hang up before they are answered; nobody hears it."""


def add_error_handlers(api: FastAPI) -> None:
    """For our own errors, for those of the framework, and for what nobody expected."""
    api.add_exception_handler(HdserveError, _on_error)
    api.add_exception_handler(HTTPException, _on_http_error)
    api.add_exception_handler(ClientDisconnect, _on_disconnect)
    api.add_exception_handler(TaskCancelledError, _on_disconnect)  # by Ray's proxy, in a body
    api.add_exception_handler(Exception, _on_unexpected)


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HdserveError)
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, RequestTimeout):  # which clients would let happen twice more
        headers["x-should-retry"] = "false"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = error_body(RequestError(str(error.detail)))
    body["error"] |= {"type": "invalid_request_error", "code": "invalid_route"}
    headers = {**(error.headers or {})}
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    return JSONResponse(body, status_code=error.status_code, headers=headers)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_unexpected(_request: Request, _error: Exception) -> JSONResponse:
    error = HdserveError("an internal error occurred; the log of the gateway says more")
    return JSONResponse(error_body(error), status_code=500)


def _allowed_methods(request: Request) -> list[str]:
    """Of all routes of a path; Starlette names those of the first one alone."""
    routes = request.app.router.routes
    return [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes
        )
    ]
