"""What the routes that generate have in common, besides the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import Request

from deployments.access import identity_of
from deployments.generation import Delta, GenerationRequest, Records, Summary
from deployments.http_tracing import trace_of
from deployments.session import SESSION_HEADER, session_id
from hdserve.config import GatewayConfig
from hdserve.errors import InvalidRequest

GENERATION_ERRORS: Mapping[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is wrong"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "No such model"},
    413: {"description": "The body is too large"},
    429: {"description": "Too many requests are waiting"},
    503: {"description": "No replica can answer"},
}
"""By status, as the schema documents them."""


def request_id(request: Request) -> str:
    """The id of who sent it, or a new one."""
    return request.headers.get("x-request-id", "")[:64] or uuid4().hex


def owned(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """``generation`` in the namespace of who sent it, in its conversation and its trace."""
    return replace(
        generation,
        namespace=identity_of(request).namespace,
        session_id=session_id(request.headers.get(SESSION_HEADER, ""), generation),
        trace=trace_of(request),
    )


def ignored_header(config: GatewayConfig, ignored: tuple[str, ...]) -> dict[str, str]:
    """The header that names the fields nobody documents.

    Raises:
        InvalidRequest: there are some, and the configuration wants strict requests.
    """
    if not ignored:
        return {}
    if config.strict_requests:
        name = _header_value(ignored[:1])[:100]
        raise InvalidRequest(f"the parameter {name!r} is unknown", name)
    return {"x-hdserve-ignored": _header_value(ignored)}


async def flat(messages: AsyncIterable[Records]) -> AsyncIterator[Delta | Summary]:
    """The records one by one."""
    async for records in messages:
        for record in records:
            yield record


def _header_value(names: Iterable[str]) -> str:
    """Names a client chose, as printable ASCII of bounded length."""
    return ", ".join(names).encode("unicode_escape").decode()[:1000]
