"""What the routes that generate have in common, besides the gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from deployments.anthropic.protocol import MessagesBody
from deployments.events import Event
from deployments.generation import Delta, GenerationRequest, Records, Summary
from deployments.http.arrival import Arrival
from deployments.http.errors import UNEXPECTED
from deployments.http.event_stream import EVENT_STREAM, EventStream
from deployments.http.json_answer import json_answer
from deployments.http.keep_alive import COMMENT
from deployments.http.param_names import with_params_named
from deployments.http.tracing import trace_error
from deployments.off_loop import MAX_SHARED_SIZE
from deployments.openai.request_body import RequestBody
from hdserve.errors import HdserveError

logger = logging.getLogger(__name__)

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
        """How many token ids and log probabilities were collected, of those that are shown; long
        text counts, too."""

    def whole(self, summary: Summary) -> dict[str, Any]:
        """Return the answer in one object."""


class Prepared(NamedTuple):
    """An answer that is about to be asked for, and what builds it."""

    builder: AnswerBuilder
    generation: GenerationRequest


Prepare = Callable[[], Awaitable[Prepared]]
"""May wait for a replica to describe itself."""


class EventForm(NamedTuple):
    """How a stream is written.

    Attributes:
        write: an event as it is sent.
        last: what is sent behind the last event.
        sign: of life, sent in silences.
        has_long_events: whether some repeat all log probabilities that came.
        told_errors: errors that are told in a stream, under status 200, even if they come first.
    """

    write: Callable[[Event], bytes]
    last: bytes = b""
    sign: bytes = COMMENT
    has_long_events: bool = False
    told_errors: tuple[type[HdserveError], ...] = ()

    def written(self, events: list[Event]) -> bytes:
        """Return events as they are sent together."""
        return b"".join(map(self.write, events))


async def answer(
    arrival: Arrival,
    body: RequestBody | MessagesBody,
    prepare: Prepare,
    fail: Callable[[HdserveError], list[Event]],
    form: EventForm,
) -> Response:
    """Return the answer in one object, or as a stream of events.  A stream that is refused before
    any was sent, or a sign of life, gets its status, unless the form has events for that; of what
    goes wrong later the last event tells.

    Args:
        fail: the events of an answer that fails before it is prepared.

    Raises:
        HdserveError: as the model server raised it, or that it ended too early.
    """
    gateway, deadline = arrival.gateway, arrival.deadline

    async def begin() -> tuple[AnswerBuilder, AsyncGenerator[Records], Mapping[str, str]]:
        builder, generation = await prepare()
        generation = await arrival.owned(generation)
        headers = await arrival.ignored_header(body, generation.unheld)
        records = gateway.generate(body.model, generation, deadline)
        return builder, with_params_named(body.param_names, records), headers

    if not body.stream:
        return await _whole_answer(arrival, *await begin())

    async def events() -> AsyncGenerator[bytes]:
        """Yield the events as they are sent: what came together is written together."""
        nonlocal fail
        with _unexpected_told():
            builder, messages, headers = await begin()
            fail = builder.fail
            stream.headers.update(headers)  # unless they were sent with a sign of life
            async with aclosing(messages):
                while True:
                    records = await _next(messages)
                    is_last = isinstance(records[-1], Summary)
                    made = [*_events_of(builder, records)]
                    size = builder.size if form.has_long_events else 0
                    if is_last and size > MAX_SHARED_SIZE:  # each may be very long
                        for event in made:
                            yield await gateway.off_loop(size, form.written, [event])
                        made = []
                    found = await gateway.off_loop(min(size, MAX_SHARED_SIZE), form.written, made)
                    if is_last:
                        yield found + form.last
                        return
                    if found:
                        yield found

    async def write_error(error: HdserveError) -> bytes:
        request = arrival.request
        gateway.http_metrics.stream_failed(request.scope["route"].path, error.status)
        trace_error(request, error)
        # Long events may repeat much of the body.
        size = len(await request.body()) if form.has_long_events else 0
        making = partial(_failed, form, fail, error)
        return await gateway.off_loop(min(size, MAX_SHARED_SIZE), making)

    stream = EventStream(
        events(),
        write_error,
        deadline,
        sign=form.sign,
        interval_s=gateway.config.gateway.stream_keep_alive_s,
        told_errors=form.told_errors,
    )
    return stream


@contextmanager
def _unexpected_told() -> Iterator[None]:
    """Have a stream end with an error also where it is none of ours, and log that.

    Raises:
        HdserveError: instead of what is unexpected.
    """
    try:
        yield
    except (HdserveError, ClientDisconnect):
        raise
    except Exception as error:
        logger.exception("a stream ends with an unexpected error")
        raise HdserveError(UNEXPECTED) from error


def _failed(
    form: EventForm, fail: Callable[[HdserveError], list[Event]], error: HdserveError
) -> bytes:
    return form.written(fail(error)) + form.last


async def _whole_answer(
    arrival: Arrival,
    builder: AnswerBuilder,
    messages: AsyncGenerator[Records],
    headers: Mapping[str, str],
) -> Response:
    async with aclosing(messages):
        while True:
            records = await _next(messages)
            for record in records:
                if isinstance(record, Summary):
                    make = partial(builder.whole, record)
                    off_loop, deadline = arrival.gateway.off_loop, arrival.deadline
                    return await json_answer(off_loop, builder.size, make, deadline, headers)
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
