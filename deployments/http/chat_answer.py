"""Answering chats, in the terms of any API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from fastapi.responses import Response

from deployments.anthropic.protocol import MessagesBody
from deployments.events import Event
from deployments.http.arrival import Arrival
from deployments.http.generation_route import AnswerBuilder, EventForm, Prepared, answer
from deployments.http.json_answer import long_event
from deployments.http.param_names import params_named
from deployments.openai.protocol import ChatBody
from deployments.openai.responses_protocol import ResponsesBody
from deployments.parsers.tool_parser import MakeParser
from hdserve.errors import HdserveError, PromptTooLong

Body = TypeVar("Body", bound=ChatBody | ResponsesBody | MessagesBody)

RESPONSE_EVENTS = EventForm(long_event, has_long_events=True, told_errors=(PromptTooLong,))
"""As in the API of OpenAI, events say that the context is full: it is by these that clients see
that the conversation must be made shorter."""


async def answer_chat(
    arrival: Arrival,
    kind: type[Body],
    make_builder: Callable[[Body, str, MakeParser | None], AnswerBuilder],
    form: EventForm = RESPONSE_EVENTS,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return the answer to a chat, or to the chat that a request stands for.

    Args:
        kind: of its body.
        make_builder: makes the answer's builder from the body, an id, and the call parser.
        form: of a stream.
        headers: further headers of the answer.
    """
    body = await arrival.read(kind)

    async def prepare() -> Prepared:
        with params_named(body.param_names):
            chat = body if isinstance(body, ChatBody) else await arrival.work(body.to_chat)
            parser = await arrival.gateway.tool_parser(
                body.model, arrival.deadline, has_tools=chat.may_call_tools
            )
            generation = await arrival.generation(chat.to_generation, arrival.own_id, parser)
        return Prepared(make_builder(body, arrival.own_id, chat.answer_parser(parser)), generation)

    def fail(error: HdserveError) -> list[Event]:
        return make_builder(body, arrival.own_id, None).fail(error)

    found = await answer(arrival, body, prepare, fail, form)
    found.headers.update(headers)
    return found
