"""``POST /v1/responses``: the OpenAI Responses API, without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.http.body_schema import body_schema
from deployments.http.generation_route import (
    GENERATION_RESPONSES,
    ignored_header,
    owned,
    request_id,
    streamed_answer,
    whole_answer,
)
from deployments.http.json_body import read_json
from deployments.http.param_names import params_named, with_params_named
from deployments.openai.response_events import ResponseEvents, named_event
from deployments.openai.responses_protocol import PARAM_NAMES, ResponsesBody

if TYPE_CHECKING:
    from deployments.gateway import Gateway


def add_responses_route(api: FastAPI, gateway: Gateway) -> None:
    """Add the route, whose answers are those of a chat in other words."""

    @api.post(
        "/v1/responses",
        responses=dict(GENERATION_RESPONSES),
        openapi_extra=body_schema(ResponsesBody),
    )
    async def responses(request: Request) -> Response:
        """Answer a conversation, with items and events."""
        deadline = gateway.deadline()
        body = ResponsesBody.parse(await deadline.wait(read_json(request)))
        headers = ignored_header(gateway.config.gateway, body, gateway.http_metrics)
        with params_named(PARAM_NAMES):
            chat = body.to_chat()
            has_tools = chat.may_call_tools
            parser = await gateway.tool_parser(body.model, deadline, has_tools=has_tools)
            generation = chat.to_generation(request_id(request), parser)
        generation = await owned(request, generation)
        events = ResponseEvents(body, generation.request_id, chat.tool_reader(parser))
        found = gateway.generate(body.model, generation, deadline)
        records = with_params_named(PARAM_NAMES, found)
        if not body.stream:
            return await whole_answer(events, records, headers)
        return await streamed_answer(events, records, headers, deadline, write=named_event)
