"""What the routes that generate have in common, besides the gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastapi import Request
from fastapi.responses import Response

from deployments.deadline import Deadline
from deployments.events import Event
from deployments.generation import Delta, GenerationRequest, Records, Summary
from deployments.http.access import identity_of
from deployments.http.event_stream import EVENT_STREAM, EventStream
from deployments.http.json_answer import json_answer
from deployments.http.keep_alive import COMMENT
from deployments.http.tracing import trace_of
from deployments.off_loop import OffLoop
from deployments.openai.request_body import OfferedBody
from deployments.session import SESSION_HEADER, session_id
from hdserve.errors import HdserveError, InvalidRequest

if TYPE_CHECKING:
    from deployments.gateway import Gateway

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
        "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
    },
    **GENERATION_ERRORS,
}
"""The responses of routes that can stream; every 200 also has JSON among its contents."""

SPECULATION_HEADER = "x-hdserve-speculation"
"""The header that switches drafts off, for clients that cannot add fields to their bodies."""


async def owned(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """Return ``generation`` with the namespace of its sender, its session, its trace and the size
    of the body; without drafts if a header says so.

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


class Prepared(NamedTuple):
    """What is known of an answer before it begins."""

    builder: AnswerBuilder
    messages: AsyncGenerator[Records]
    headers: Mapping[str, str]


Prepare = Callable[[], Awaitable[Prepared]]
"""Asks for an answer.  It may first wait for a replica to describe itself."""


class EventForm(NamedTuple):
    """How a stream is written.

    Attributes:
        write: an event as it is sent.
        last: what is sent behind the last event.
        sign: of life, sent in silences.
    """

    write: Callable[[Event], bytes]
    last: bytes = b""
    sign: bytes = COMMENT


async def answer(
    gateway: Gateway,
    prepare: Prepare,
    fail: Callable[[HdserveError], list[Event]],
    deadline: Deadline,
    form: EventForm,
    *,
    is_streamed: bool,
) -> Response:
    """Return the answer in one object, or as a stream of events.  A stream that is refused before
    any was sent, or a sign of life, gets its status; of what goes wrong later the last event tells.

    Args:
        fail: the events of an answer that fails before it is prepared.

    Raises:
        HdserveError: as the model server raised it, or that it ended too early.
    """
    if not is_streamed:
        return await _whole_answer(prepare, gateway.off_loop)

    async def events() -> AsyncGenerator[bytes]:
        """Yield the events as they are sent: what came together is written together."""
        nonlocal fail
        builder, messages, headers = await prepare()
        fail = builder.fail
        stream.headers.update(headers)  # unless they were sent with a sign of life
        async with aclosing(messages):
            while True:
                records = await _next(messages)
                found = b"".join(map(form.write, _events_of(builder, records)))
                if isinstance(records[-1], Summary):
                    yield found + form.last
                    return
                if found:
                    yield found

    def write_error(error: HdserveError) -> bytes:
        return b"".join(map(form.write, fail(error))) + form.last

    interval_s = gateway.config.gateway.stream_keep_alive_s
    stream = EventStream(events(), write_error, deadline, sign=form.sign, interval_s=interval_s)
    return stream


async def _whole_answer(prepare: Prepare, off_loop: OffLoop) -> Response:
    builder, messages, headers = await prepare()
    async with aclosing(messages):
        while True:
            records = await _next(messages)
            for record in records:
                if isinstance(record, Summary):
                    make = partial(builder.whole, record)
                    return await json_answer(off_loop, builder.size, make, headers)
                builder.collect(record)


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
