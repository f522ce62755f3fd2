"""What a gateway counts about the HTTP requests it answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import Match

from deployments.http.errors import CLIENT_CLOSED_REQUEST
from deployments.http.event_stream import EVENT_STREAM
from deployments.http.keep_alive import SIGNS
from deployments.metrics.samples import Histogram, Observations, Sample
from deployments.metrics.text import CONTENT_TYPE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from deployments.gateway import Gateway

_REQUESTS = "hdserve_http_requests"
_STREAM_ERRORS = "hdserve_stream_errors"
_IGNORED = "hdserve_ignored_fields"
_TIMEOUTS = "hdserve_request_timeouts"
_SILENCES = "hdserve_replica_silences"
_FIRST_BYTE = "hdserve_http_first_byte_seconds"
_WHOLE = "hdserve_http_request_seconds"
_UNKNOWN_ROUTE = "unknown"
_STREAMS = {EVENT_STREAM, "application/octet-stream"}
"""What is sent in parts, for as long as it takes: answers of models, and archives."""

_BEFORE_ROUTES = (401, 404, 405, 413, 500, 504)


class HttpMetrics:
    """Requests by route and status; changed in one event loop, read in any thread.

    Args:
        models: names of the models that answer.

    Attributes:
        observations: all latencies, for Ray.
    """

    def __init__(self, models: Iterable[str] = ()) -> None:
        self.observations = Observations()
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter({(_IGNORED, ()): 0})
        """By metric and labels."""
        for model in models:
            self._counts[_TIMEOUTS, (model,)] = self._counts[_SILENCES, (model,)] = 0
        self._histograms: dict[tuple[str, str], Histogram] = {}

    def expect(self, answers: Iterable[tuple[str, int]], streams: Iterable[str]) -> None:
        """Start counters that do not exist yet at 0: a rate needs a first value.

        Args:
            answers: routes and statuses.  Latencies start with the first one: their buckets would
                be some hundred lines at every scrape.
            streams: routes that can answer in parts.
        """
        for route, status in answers:
            self._counts.setdefault((_REQUESTS, (route, str(status))), 0)
        for route in streams:
            self._counts.setdefault((_STREAM_ERRORS, (route,)), 0)

    def observe(self, route: str, status: int, first_byte_s: float, whole_s: float) -> None:
        """Count a request that was answered; both times are measured from its arrival: to the first
        byte, signs of life left out, and to the end of the answer."""
        self._counts[_REQUESTS, (route, str(status))] += 1
        for name, value in ((_FIRST_BYTE, first_byte_s), (_WHOLE, whole_s)):
            if (name, route) not in self._histograms:
                self._histograms[name, route] = Histogram(name, (route,), self.observations)
            self._histograms[name, route].observe(value)

    def stream_failed(self, route: str, status: int) -> None:
        """Count a stream that ended with an error, unless its request was at fault.

        Args:
            status: what the error would have been answered with.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._counts[_STREAM_ERRORS, (route,)] += 1

    def ignored(self, num_fields: int) -> None:
        """Count fields of a request that were ignored."""
        self._counts[_IGNORED, ()] += num_fields

    def timed_out(self, model: str) -> None:
        """Count an answer of ``model`` that was cut off because it took too long."""
        self._counts[_TIMEOUTS, (model,)] += 1

    def fell_silent(self, model: str) -> None:
        """Count an answer of ``model`` that ended because its replica was not heard of."""
        self._counts[_SILENCES, (model,)] += 1

    def samples(self) -> tuple[Sample, ...]:
        """Return the current counts and latencies."""
        counts = tuple(self._counts.items())
        histograms = tuple(self._histograms.values())
        return (
            *(Sample(name, count, labels) for (name, labels), count in counts),
            *(histogram.sample() for histogram in histograms),
        )


class MeasuredRequests:
    """ASGI middleware that reports each request to ``metrics`` when it was answered or given up."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = scope.get("state", {}).get("arrived_s", time.monotonic())
        status, first_byte_s = 0, 0.0

        async def measured(message: Message) -> None:
            nonlocal status, first_byte_s
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_byte_s and message.get("body") not in SIGNS:
                first_byte_s = time.monotonic() - started_s
            await send(message)

        try:
            await self._app(scope, receive, measured)
        except asyncio.CancelledError:  # from Ray's proxy, whose client is gone
            status = status or CLIENT_CLOSED_REQUEST
            raise
        except Exception:
            status = status or 500  # the answer is then made outside of all middleware
            raise
        finally:
            if status:
                whole_s = time.monotonic() - started_s
                route = _route_of(scope, status)
                self._metrics.observe(route, status, first_byte_s or whole_s, whole_s)


def _route_of(scope: Scope, status: int) -> str:
    """Return the route of a request, also if it was refused before routing, provided that the route
    declares this status."""
    found = scope.get("route")
    if found is None and "app" in scope:
        routes = _routes_of(scope["app"])
        meant = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
        found = meant if meant and status in map(int, meant.responses) else None
    return getattr(found, "path", _UNKNOWN_ROUTE)


def _routes_of(api: FastAPI) -> Iterator[APIRoute]:
    """Yield all routes, also those of routers, which FastAPI may keep as they were included."""
    for route in api.routes:
        router = getattr(route, "original_router", None)
        for found in [route] if router is None else router.routes:
            if isinstance(found, APIRoute):
                yield found


def known_answers(api: FastAPI) -> Iterator[tuple[str, int]]:
    """Yield each route with the statuses it declares, and with 200 and 500; and the answers given
    before a route is found."""
    for route in _routes_of(api):
        declared = (int(status) for status in route.responses)
        yield from ((route.path, status) for status in (200, 500, *declared))
    yield from ((_UNKNOWN_ROUTE, status) for status in _BEFORE_ROUTES)


def known_streams(api: FastAPI) -> Iterator[str]:
    """Yield each route that can answer in parts."""
    for route in _routes_of(api):
        if not _STREAMS.isdisjoint(route.responses.get(200, {}).get("content", {})):
            yield route.path


def add_metrics_route(api: FastAPI, gateway: Gateway) -> None:
    """Add ``GET /metrics``, and the middleware that feeds it."""
    api.add_middleware(MeasuredRequests, metrics=gateway.http_metrics)

    @api.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The metrics of all replicas in the Prometheus text format."""
        return Response(await gateway.metrics_text(), media_type=CONTENT_TYPE)
