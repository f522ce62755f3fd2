"""``POST /v1/responses``: the OpenAI Responses API, without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.http.arrival import Arrival
from deployments.http.body_schema import body_schema
from deployments.http.chat_answer import answer_chat
from deployments.http.generation_route import GENERATION_RESPONSES
from deployments.openai.responses_events import ResponseEvents
from deployments.openai.responses_protocol import ResponsesBody

if TYPE_CHECKING:
    from deployments.gateway import Gateway


def add_responses_route(api: FastAPI, gateway: Gateway) -> None:
    """Add the route; its answers are those of a chat in other terms."""

    @api.post(
        "/v1/responses",
        responses=dict(GENERATION_RESPONSES),
        openapi_extra=body_schema(ResponsesBody),
    )
    async def responses(request: Request) -> Response:
        """Answer a conversation, with items and events."""
        return await answer_chat(Arrival(gateway, request), ResponsesBody, ResponseEvents)
