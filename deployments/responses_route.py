"""``POST /v1/responses``: the OpenAI Responses API, without a store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from deployments.body_schema import body_schema
from deployments.generation import GenerationRequest, Records, Summary
from deployments.generation_route import (
    GENERATION_ERRORS,
    flat,
    ignored_header,
    owned,
    request_id,
)
from deployments.json_body import read_json
from deployments.response_events import ResponseEvents, named_event
from deployments.response_items import Event
from deployments.responses_protocol import ResponsesBody, response_params
from deployments.tool_parsers import TOOL_PARSERS
from hdserve.errors import HdserveError

if TYPE_CHECKING:
    from deployments.gateway import Gateway


def add_responses_route(api: FastAPI, gateway: Gateway) -> None:
    """The route, whose answers are those of a chat in other words."""

    @api.post(
        "/v1/responses",
        responses=dict(GENERATION_ERRORS),
        openapi_extra=body_schema(ResponsesBody),
    )
    async def responses(request: Request) -> Response:
        """Answer a conversation, with items and events."""
        body = ResponsesBody.parse(await read_json(request))
        headers = ignored_header(gateway.config.gateway, body.ignored)
        parser = TOOL_PARSERS.get(gateway.model(body.model).tool_parser or "")
        with response_params():
            chat = body.to_chat()
            generation = owned(request, chat.to_generation(request_id(request), parser))
        reader = parser if chat.may_call_tools else None
        events = ResponseEvents(body, generation.request_id, reader)
        records = _generate(gateway, body.model, generation)
        if not body.stream:
            return JSONResponse(await _whole(events, records), headers=headers)
        first = await anext(records)
        stream = _stream(events, first, records)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _generate(
    gateway: Gateway, model: str, generation: GenerationRequest
) -> AsyncGenerator[Records]:
    """The records of an answer; errors name the parameters as this API does."""
    with response_params():
        async with aclosing(gateway.generate(model, generation)) as found:
            async for records in found:
                yield records


async def _whole(events: ResponseEvents, records: AsyncGenerator[Records]) -> dict[str, Any]:
    async with aclosing(records):
        async for record in flat(records):
            if isinstance(record, Summary):
                response: dict[str, Any] = events.end(record)[-1]["response"]
                return response
            events.add(record)
    raise HdserveError("the model server ended without a summary")


async def _stream(
    events: ResponseEvents, first: Records, rest: AsyncGenerator[Records]
) -> AsyncIterator[bytes]:
    """What came together is written together; an error in mid-stream is the last event."""
    records = first
    async with aclosing(rest):
        yield b"".join(map(named_event, events.begin()))
        try:
            while True:
                yield b"".join(map(named_event, _events_of(events, records)))
                if isinstance(records[-1], Summary):
                    return
                records = await anext(rest)
        except HdserveError as error:
            yield named_event(events.fail(error))


def _events_of(events: ResponseEvents, records: Records) -> Iterator[Event]:
    for record in records:
        yield from events.end(record) if isinstance(record, Summary) else events.add(record)
