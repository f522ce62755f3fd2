"""Errors in the format of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import Scope

from deployments.anthropic import objects as anthropic
from deployments.http.own_path import own_path, without_slashes
from deployments.http.request_id import anthropic_headers, sent_id
from deployments.openai import objects as openai
from hdserve.errors import HdserveError

_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
_VERSION_HEADER = "anthropic-version"
"""The header that all clients of Anthropic's API send, and no others."""


def error_answer(
    scope: Scope,
    error: HdserveError,
    *,
    status: int | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the answer of a request that failed.

    Args:
        status, code: replace the error's own, which may be more general.
    """
    found = dict(headers or {})
    if _is_anthropic(scope):
        told = anthropic.error_body(error, sent_id(scope), status)
        return JSONResponse(told, status or error.status, found | anthropic_headers(scope))
    body: dict[str, Any] = openai.error_body(error)
    if code is not None:
        body["error"] |= {"type": "invalid_request_error", "code": code}
    return JSONResponse(body, status or error.status, found)


def _is_anthropic(scope: Scope) -> bool:
    """Whether the route is Anthropic's, or of both APIs and a client of Anthropic's asks."""
    path = without_slashes(own_path(scope))
    if _is_below(path, _MODELS):
        return _VERSION_HEADER in Headers(scope=scope)
    return _is_below(path, _MESSAGES)


def _is_below(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")
