"""What the routes that generate have in common, besides the gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Send

from deployments.deadline import Deadline
from deployments.events import Event
from deployments.generation import Delta, GenerationRequest, Records, Summary
from deployments.http.access import identity_of
from deployments.http.json_answer import json_answer
from deployments.http.tracing import trace_of
from deployments.off_loop import OffLoop
from deployments.openai.request_body import OfferedBody
from deployments.session import SESSION_HEADER, session_id
from hdserve.errors import HdserveError, InvalidRequest

if TYPE_CHECKING:
    from deployments.gateway import Gateway

_EVENT_STREAM = "text/event-stream"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Nginx, which would keep events back, passes them on as they come."""

_GRACE_S = 5.0
"""How long a client may take, once the time of its request is over, to read what it was sent."""

GENERATION_ERRORS: Mapping[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is wrong"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "No such model"},
    408: {"description": "The body came too slowly"},
    413: {"description": "The body is too large"},
    429: {"description": "Too many requests are waiting"},
    503: {"description": "No replica can answer"},
    504: {"description": "The answer took longer than is allowed"},
}
"""The errors of these routes by status, as the schema documents them."""

GENERATION_RESPONSES: Mapping[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream: true` its parts, as events",
        "content": {_EVENT_STREAM: {"schema": {"type": "string"}}},
    },
    **GENERATION_ERRORS,
}
"""The responses of routes that can stream; every 200 also has JSON among its contents."""

SPECULATION_HEADER = "x-hdserve-speculation"
"""The header that switches drafts off, for clients that cannot add fields to their bodies."""


async def owned(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """Return ``generation`` in the namespace of who sent it, in its conversation and its trace,
    with the size of the body, which was read; without drafts where a header says so.

    Raises:
        InvalidRequest: the header says something else.
    """
    speculation = request.headers.get(SPECULATION_HEADER, "on")
    if speculation not in ("on", "off"):
        raise InvalidRequest(f"{SPECULATION_HEADER} is 'on' or 'off'", SPECULATION_HEADER)
    if speculation == "off":
        generation = replace(
            generation, speculation={**generation.speculation, "is_enabled": False}
        )
    return replace(
        generation,
        namespace=identity_of(request).namespace,
        session_id=session_id(request.headers.get(SESSION_HEADER, ""), generation),
        trace=trace_of(request),
        num_body_bytes=len(await request.body()),
    )


async def ignored_header(gateway: Gateway, body: OfferedBody, deadline: Deadline) -> dict[str, str]:
    """Return the header that names what of ``body`` is ignored, which the metrics are told.

    Raises:
        Unsupported: something is left out, and the configuration wants strict requests.
        InvalidRequest: there are fields nobody documents, and it does.
    """
    unread = await gateway.unread_by_template(body.model, deadline, body.variables)
    ignored, left_out = body.ignored, body.left_out
    known = body.unmet.union(left_out)
    undocumented = [name for name in ignored if name not in known]
    if gateway.config.gateway.strict_requests:
        for error in left_out.values():
            raise error
        if undocumented:
            name = _header_value(undocumented[:1])[:100]
            raise InvalidRequest(f"the parameter {name!r} is unknown", name)
    ignored = tuple(sorted(unread.union(ignored)))
    gateway.http_metrics.ignored(len(ignored))
    return {"x-hdserve-ignored": _header_value(ignored)} if ignored else {}


class AnswerBuilder(Protocol):
    """Builds one answer: its events, or the whole of it from what was collected."""

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of a delta; before the first one those that begin the answer."""

    def end(self, summary: Summary) -> list[Event]:
        """Return the events after the last delta."""

    def fail(self, error: HdserveError) -> list[Event]:
        """Return the events instead of what has not come."""

    def collect(self, delta: Delta) -> None:
        """Add a delta to the whole answer."""

    @property
    def size(self) -> int:
        """How many token ids and log probabilities were collected, of those that are shown."""

    def whole(self, summary: Summary) -> dict[str, Any]:
        """Return the answer in one object."""


async def whole_answer(
    builder: AnswerBuilder,
    messages: AsyncGenerator[Records],
    headers: Mapping[str, str],
    off_loop: OffLoop,
) -> Response:
    """Return the answer in one object.

    Raises:
        HdserveError: as the model server raised it, or that it ended too early.
    """
    async with aclosing(messages):
        while True:
            records = await _next(messages)
            for record in records:
                if isinstance(record, Summary):
                    make = partial(builder.whole, record)
                    return await json_answer(off_loop, builder.size, make, headers)
                builder.collect(record)


async def streamed_answer(
    builder: AnswerBuilder,
    messages: AsyncGenerator[Records],
    headers: Mapping[str, str],
    deadline: Deadline,
    *,
    write: Callable[[Event], bytes],
    last: bytes = b"",
) -> Response:
    """Return a stream of events.  The first records are awaited before any header is sent, so a
    request that is refused gets its status.

    Args:
        write: an event as it is sent.
        last: what is sent behind the last event.

    Raises:
        HdserveError: nothing has come but this error.
    """
    first = await _next(messages)
    stream = _stream(builder, first, messages, write, last)
    return _EventStream(stream, headers, deadline)


class _EventStream(StreamingResponse):
    """Events that end soon after ``deadline``, also where nobody reads them: a server waits with
    what is sent for a client that has not read what was sent before, for as long as it stays."""

    def __init__(
        self, events: AsyncGenerator[bytes], headers: Mapping[str, str], deadline: Deadline
    ) -> None:
        all_headers = {**_STREAM_HEADERS, **headers}
        super().__init__(events, media_type=_EVENT_STREAM, headers=all_headers)
        self._events = events
        self._deadline = deadline

    async def stream_response(self, send: Send) -> None:
        """Send the events.  Without their end, where they were not read in time: the connection is
        closed then."""
        limit = self._deadline.limit(_GRACE_S)
        try:
            async with limit:
                await super().stream_response(send)
        except TimeoutError:
            if not limit.expired():
                raise
            await self._events.aclose()


async def _stream(
    builder: AnswerBuilder,
    first: Records,
    rest: AsyncGenerator[Records],
    write: Callable[[Event], bytes],
    last: bytes,
) -> AsyncGenerator[bytes]:
    """Yield the events as they are sent: what came together is written together, and an error in
    mid-stream is the last event."""
    records = first
    async with aclosing(rest):
        events: list[Event] = []
        try:
            while True:
                events += _events_of(builder, records)
                if isinstance(records[-1], Summary):
                    break
                if events:
                    yield b"".join(map(write, events))
                    events = []
                records = await _next(rest)
        except HdserveError as error:
            events = builder.fail(error)
        yield b"".join(map(write, events)) + last


def _events_of(builder: AnswerBuilder, records: Records) -> Iterator[Event]:
    for record in records:
        yield from builder.end(record) if isinstance(record, Summary) else builder.add(record)


async def _next(messages: AsyncGenerator[Records]) -> Records:
    """Return the next records; until the summary there are some.

    Raises:
        HdserveError: there are no more, though the summary has not come.
    """
    found = await anext(messages, None)
    if found is None:
        raise HdserveError("the model server ended without a summary")
    return found


def _header_value(names: Iterable[str]) -> str:
    """Return names that a client chose as printable ASCII of bounded length."""
    return ", ".join(names).encode("unicode_escape").decode()[:1000]
