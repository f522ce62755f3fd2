"""The Messages API of Anthropic."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.anthropic.message_events import MessageEvents
from deployments.anthropic.protocol import PARAM_NAMES, CountTokensBody, MessagesBody
from deployments.events import named_event
from deployments.http.body_schema import body_schema
from deployments.http.chat_in_other_words import answer_as_chat
from deployments.http.generation_route import (
    GENERATION_ERRORS,
    GENERATION_RESPONSES,
    EventForm,
    ignored_header,
)
from deployments.http.json_body import off_loop_by_body, read_json
from deployments.http.keep_alive import PING
from deployments.http.param_names import params_named
from deployments.http.request_id import anthropic_headers, request_id

if TYPE_CHECKING:
    from deployments.gateway import Gateway

_EVENTS = EventForm(named_event, sign=PING)


def add_messages_routes(api: FastAPI, gateway: Gateway) -> None:
    """Add the routes; their answers are those of a chat in other terms."""

    @api.post(
        "/v1/messages",
        responses=dict(GENERATION_RESPONSES),
        openapi_extra=body_schema(MessagesBody),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation, with blocks and events."""
        headers = anthropic_headers(request.scope)
        return await answer_as_chat(
            gateway, request, MessagesBody, PARAM_NAMES, MessageEvents, headers, _EVENTS
        )

    @api.post(
        "/v1/messages/count_tokens",
        responses=dict(GENERATION_ERRORS),
        openapi_extra=body_schema(CountTokensBody),
    )
    async def count_tokens(request: Request, response: Response) -> dict[str, int]:
        """The number of tokens of a conversation, as it would be answered."""
        deadline = gateway.deadline()
        large_work = partial(off_loop_by_body, request, gateway.off_loop)
        data = await deadline.wait(read_json(request, gateway.off_loop))
        body = await deadline.wait(large_work(CountTokensBody.parse, data))
        with params_named(PARAM_NAMES):
            chat = await deadline.wait(large_work(body.to_chat))
            own_id = request_id(request.scope)
            generation = await deadline.wait(large_work(chat.to_generation, own_id))
        ignored = await ignored_header(gateway, body, deadline)
        response.headers.update(ignored | anthropic_headers(request.scope))
        generation = replace(generation, num_body_bytes=len(await request.body()))
        tokens = await deadline.wait(gateway.tokenize_chat(body.model, generation))
        return {"input_tokens": len(tokens)}
