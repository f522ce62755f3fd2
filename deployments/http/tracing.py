"""The gateway's part of a trace: one span per HTTP request to the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from deployments.http.errors import CLIENT_CLOSED_REQUEST
from deployments.http.own_path import own_path
from hdserve.errors import RequestError

if TYPE_CHECKING:
    from fastapi import Request
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deployments.tracing import Tracing

_PREFIX = "/v1/"
_HEADERS = ("traceparent", "tracestate")


class TracedRequests:
    """ASGI middleware: a span from the arrival of the request's head to the last byte of its
    answer.

    Only requests of the API have one: health checks and scrapes would fill the traces.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_traced = scope["type"] == "http" and own_path(scope).startswith(_PREFIX)
        span = self._start(scope) if is_traced else None
        if span is None:
            await self._app(scope, receive, send)
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        state = scope.setdefault("state", {})
        state["trace"] = _carrier_of(span)
        try:
            await self._app(scope, receive, noted)
        except BaseException as error:
            state.setdefault("trace_error", type(error).__name__)
            status = status or (500 if isinstance(error, Exception) else CLIENT_CLOSED_REQUEST)
            raise
        finally:
            _end(span, scope, status)

    def _start(self, scope: Scope) -> Span | None:
        arrived_s = scope.get("state", {}).get("arrived_s")
        return self._tracing.start_http(scope["method"], _carrier(scope), arrived_s)


def trace_of(request: Request) -> Mapping[str, str]:
    """Return the headers that identify the span of ``request``; empty if it is not traced."""
    found: Mapping[str, str] = getattr(request.state, "trace", {})
    return found


def trace_error(request: Request, error: Exception) -> None:
    """Have the span of ``request`` tell of an error behind the status of its answer, unless the
    request was at fault."""
    if not isinstance(error, RequestError):
        request.state.trace_error = type(error).__name__


def _carrier(scope: Scope) -> dict[str, str]:
    headers = Headers(scope=scope)
    found = {name: ",".join(headers.getlist(name)) for name in _HEADERS}  # of a list in several
    return {name: value for name, value in found.items() if value}


def _carrier_of(span: Any) -> dict[str, str]:
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(found, set_span_in_context(span))
    return found


def _end(span: Any, scope: Scope, status: int) -> None:
    from opentelemetry.trace import StatusCode

    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    if status:
        span.set_attribute("http.response.status_code", status)
    error = scope["state"].get("trace_error")
    if error is not None:
        span.set_attribute("error.type", error)
    if error is not None or not status or status >= 500:
        span.set_status(StatusCode.ERROR)
    span.end()
