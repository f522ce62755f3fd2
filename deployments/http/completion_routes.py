"""Chats and completions of the OpenAI API."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.deadline import Deadline
from deployments.events import Event
from deployments.generation import GenerationRequest
from deployments.http.body_schema import body_schema
from deployments.http.generation_route import (
    GENERATION_RESPONSES,
    EventForm,
    Prepare,
    Prepared,
    answer,
    ignored_header,
    owned,
)
from deployments.http.json_body import off_loop_by_body, read_json
from deployments.http.param_names import params_named, with_params_named
from deployments.http.request_id import request_id
from deployments.openai.chat_format import ChatFormat
from deployments.openai.completion_format import CompletionFormat
from deployments.openai.objects import STREAM_END, error_body, server_sent_event
from deployments.openai.protocol import ChatBody, CompletionBody, GenerationBody
from deployments.openai.response_builder import AnswerFormat, ResponseBuilder
from hdserve.errors import HdserveError, InvalidRequest

if TYPE_CHECKING:
    from deployments.gateway import Gateway

MAX_ECHO_CHARACTERS = 1 << 23
"""The most characters of prompts that an answer repeats, over all choices: writing them takes the
gateway about 0.05 s."""

_EVENTS = EventForm(server_sent_event, STREAM_END)


def add_completion_routes(api: FastAPI, gateway: Gateway) -> None:
    """Add the routes that generate, by a conversation or a text."""
    responses = dict(GENERATION_RESPONSES)

    @api.post("/v1/chat/completions", responses=responses, openapi_extra=body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        deadline = gateway.deadline()
        large_work = partial(off_loop_by_body, request, gateway.off_loop)
        data = await deadline.wait(read_json(request, gateway.off_loop))
        body = await deadline.wait(large_work(ChatBody.parse, data))

        async def prepare() -> Prepared:
            parser = await gateway.tool_parser(body.model, deadline, has_tools=body.may_call_tools)
            with params_named(body.param_names):
                own_id = request_id(request.scope)
                generation = await deadline.wait(large_work(body.to_generation, own_id, parser))
            form = ChatFormat(
                body.tool_reader(parser),
                is_one_call=body.parallel_tool_calls is False,
                is_named_call=body.names_tool,
                num_prompt_logprobs=body.prompt_logprobs,
                shows_token_ids=bool(body.return_token_ids),
            )
            return await _prepared(gateway, body, await owned(request, generation), form, deadline)

        return await _answer(gateway, body, prepare, deadline)

    @api.post("/v1/completions", responses=responses, openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        deadline = gateway.deadline()
        large_work = partial(off_loop_by_body, request, gateway.off_loop)
        data = await deadline.wait(read_json(request, gateway.off_loop))
        body = await deadline.wait(large_work(CompletionBody.parse, data))

        async def prepare() -> Prepared:
            own_id = request_id(request.scope)
            generation = await deadline.wait(large_work(body.to_generation, own_id))
            form = CompletionFormat(
                await _echoes(gateway, body, deadline) if body.echo else (),
                num_logprobs=body.logprobs,
                num_prompt_logprobs=body.prompt_logprobs,
                shows_token_ids=bool(body.return_token_ids),
            )
            return await _prepared(gateway, body, await owned(request, generation), form, deadline)

        return await _answer(gateway, body, prepare, deadline)


async def _echoes(gateway: Gateway, body: CompletionBody, deadline: Deadline) -> tuple[str, ...]:
    """Return the texts of the prompts.

    Raises:
        InvalidRequest: repeated for each choice, they are too long.
    """
    echoes = tuple(
        [
            prompt
            if isinstance(prompt, str)
            else await deadline.wait(gateway.detokenize(body.model, list(prompt), "prompt"))
            for prompt in body.prompts
        ]
    )
    num_characters = sum(map(len, echoes)) * body.num_choices
    if num_characters > MAX_ECHO_CHARACTERS:
        reason = (
            f"echo: prompts of {num_characters} characters in total over all choices exceed the "
            f"limit of {MAX_ECHO_CHARACTERS}; ask for fewer at a time"
        )
        raise InvalidRequest(reason, "echo")
    return echoes


async def _prepared(
    gateway: Gateway,
    body: GenerationBody,
    generation: GenerationRequest,
    form: AnswerFormat,
    deadline: Deadline,
) -> Prepared:
    builder = ResponseBuilder(
        form,
        body.model,
        generation.request_id,
        generation.num_choices,
        includes_usage=body.includes_usage,
        counts_in_chunks=body.counts_in_chunks,
    )
    headers = await ignored_header(gateway, body, deadline)
    records = gateway.generate(body.model, generation, deadline)
    return Prepared(builder, with_params_named(body.param_names, records), headers)


async def _answer(
    gateway: Gateway, body: GenerationBody, prepare: Prepare, deadline: Deadline
) -> Response:
    def fail(error: HdserveError) -> list[Event]:
        return [error_body(error)]

    return await answer(gateway, prepare, fail, deadline, _EVENTS, is_streamed=bool(body.stream))
