"""Chats and completions of the OpenAI API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.events import server_sent_event
from deployments.http.arrival import Arrival
from deployments.http.body_schema import body_schema
from deployments.http.chat_answer import answer_chat
from deployments.http.generation_route import GENERATION_RESPONSES, EventForm, Prepared, answer
from deployments.openai.chat_format import ChatFormat
from deployments.openai.completion_builder import AnswerFormat, CompletionBuilder
from deployments.openai.completion_format import CompletionFormat
from deployments.openai.objects import STREAM_END, error_body
from deployments.openai.protocol import ChatBody, CompletionBody, GenerationBody
from deployments.parsers.tool_parser import MakeParser
from hdserve.errors import InvalidRequest

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
        return await answer_chat(Arrival(gateway, request), ChatBody, _chat_builder, _EVENTS)

    @api.post("/v1/completions", responses=responses, openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue a text."""
        arrival = Arrival(gateway, request)
        body = await arrival.read(CompletionBody)

        async def prepare() -> Prepared:
            generation = await arrival.generation(body.to_generation, arrival.own_id)
            form = CompletionFormat(
                await _echoes(arrival, body) if body.echo else (),
                num_logprobs=body.logprobs,
                num_prompt_logprobs=body.prompt_logprobs,
                shows_token_ids=bool(body.return_token_ids),
            )
            return Prepared(_builder(form, body, arrival.own_id), generation)

        return await answer(arrival, body, prepare, lambda error: [error_body(error)], _EVENTS)


def _chat_builder(
    body: ChatBody, request_id: str, tool_parser: MakeParser | None
) -> CompletionBuilder:
    form = ChatFormat(
        tool_parser,
        is_one_call=body.parallel_tool_calls is False,
        is_named_call=body.names_tool,
        num_prompt_logprobs=body.prompt_logprobs,
        shows_token_ids=bool(body.return_token_ids),
    )
    return _builder(form, body, request_id)


def _builder(form: AnswerFormat, body: GenerationBody, request_id: str) -> CompletionBuilder:
    return CompletionBuilder(
        form,
        body.model,
        request_id,
        body.num_choices,
        includes_usage=body.includes_usage,
        counts_in_chunks=body.counts_in_chunks,
    )


async def _echoes(arrival: Arrival, body: CompletionBody) -> tuple[str, ...]:
    """Return the texts of the prompts.

    Raises:
        InvalidRequest: repeated for each choice, they are too long.
    """
    detokenize, wait = arrival.gateway.detokenize, arrival.deadline.wait
    echoes = tuple(
        [
            prompt
            if isinstance(prompt, str)
            else await wait(detokenize(body.model, list(prompt), "prompt"))
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
