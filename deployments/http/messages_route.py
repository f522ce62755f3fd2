"""The Messages API of Anthropic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.anthropic.message_events import MessageEvents
from deployments.anthropic.protocol import CountTokensBody, MessagesBody
from deployments.events import named_event
from deployments.http.arrival import Arrival
from deployments.http.body_schema import body_schema
from deployments.http.chat_answer import answer_chat
from deployments.http.generation_route import GENERATION_ERRORS, GENERATION_RESPONSES, EventForm
from deployments.http.keep_alive import PING
from deployments.http.param_names import params_named
from deployments.http.request_id import anthropic_headers

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
        arrival, headers = Arrival(gateway, request), anthropic_headers(request.scope)
        return await answer_chat(arrival, MessagesBody, MessageEvents, _EVENTS, headers)

    @api.post(
        "/v1/messages/count_tokens",
        responses=dict(GENERATION_ERRORS),
        openapi_extra=body_schema(CountTokensBody),
    )
    async def count_tokens(request: Request, response: Response) -> dict[str, int]:
        """The number of tokens of a conversation, as it would be answered."""
        arrival = Arrival(gateway, request)
        body = await arrival.read(CountTokensBody)
        with params_named(body.param_names):
            chat = await arrival.work(body.to_chat)
            generation = await arrival.generation(chat.to_generation, arrival.own_id)
        ignored = await arrival.ignored_header(body, generation.unheld)
        response.headers.update(ignored | anthropic_headers(request.scope))
        asking = gateway.tokenize_chat(body.model, await arrival.sized(generation))
        return {"input_tokens": len(await arrival.deadline.wait(asking))}
