"""Answering requests of APIs that express a chat in other terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request
from fastapi.responses import Response

from deployments.anthropic.protocol import MessagesBody
from deployments.events import Event, named_event
from deployments.http.generation_route import (
    AnswerBuilder,
    EventForm,
    Prepared,
    answer,
    ignored_header,
    owned,
)
from deployments.http.json_body import off_loop_by_body, read_json
from deployments.http.param_names import params_named, with_params_named
from deployments.http.request_id import request_id
from deployments.openai.responses_protocol import ResponsesBody
from deployments.parsers.tool_parser import MakeParser
from hdserve.errors import HdserveError

if TYPE_CHECKING:
    from deployments.gateway import Gateway

Body = TypeVar("Body", ResponsesBody, MessagesBody)

NAMED_EVENTS = EventForm(named_event)


async def answer_as_chat(
    gateway: Gateway,
    request: Request,
    kind: type[Body],
    param_names: Mapping[str, str],
    make_builder: Callable[[Body, str, MakeParser | None], AnswerBuilder],
    headers: Mapping[str, str] = MappingProxyType({}),
    form: EventForm = NAMED_EVENTS,
) -> Response:
    """Return the answer to the chat that a request stands for, as one object or as named events.

    Args:
        kind: of its body.
        param_names: the API's names of the parameters of a chat that it calls otherwise.
        make_builder: makes the answer's builder from the body, an id, and the call parser.
        headers: further headers of the answer.
        form: of a stream.
    """
    deadline = gateway.deadline()
    large_work = partial(off_loop_by_body, request, gateway.off_loop)
    data = await deadline.wait(read_json(request, gateway.off_loop))
    body = await deadline.wait(large_work(kind.parse, data))
    own_id = request_id(request.scope)

    async def prepare() -> Prepared:
        with params_named(param_names):
            chat = await deadline.wait(large_work(body.to_chat))
            has_tools = chat.may_call_tools
            parser = await gateway.tool_parser(body.model, deadline, has_tools=has_tools)
            generation = await deadline.wait(large_work(chat.to_generation, own_id, parser))
        generation = await owned(request, generation)
        ignored = await ignored_header(gateway, body, deadline)
        builder = make_builder(body, own_id, chat.tool_reader(parser))
        records = gateway.generate(body.model, generation, deadline)
        return Prepared(builder, with_params_named(param_names, records), ignored)

    def fail(error: HdserveError) -> list[Event]:
        return make_builder(body, own_id, None).fail(error)

    found = await answer(gateway, prepare, fail, deadline, form, is_streamed=bool(body.stream))
    found.headers.update(headers)
    return found
