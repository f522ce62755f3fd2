"""Texts as token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from deployments.http.arrival import Arrival
from deployments.http.body_schema import body_schema
from deployments.http.generation_route import GENERATION_ERRORS
from deployments.http.json_answer import json_answer
from deployments.openai.protocol import DetokenizeBody, TokenizeBody
from hdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from deployments.gateway import Gateway

_MAX_TOKEN_TEXTS = 1 << 14
"""The most token texts in one message of a replica, which takes milliseconds to parse; meanwhile no
stream continues."""


def add_token_routes(api: FastAPI, gateway: Gateway) -> None:
    """Add the routes that ask a model's tokenizer."""
    errors = dict(GENERATION_ERRORS)

    @api.post("/tokenize", responses=errors, openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a conversation."""
        arrival = Arrival(gateway, request)
        return await arrival.deadline.wait(_tokenize(gateway, arrival))

    @api.post("/detokenize", responses=errors, openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        arrival = Arrival(gateway, request)
        body = await arrival.read(DetokenizeBody)
        headers = await arrival.ignored_header(body)
        asking = gateway.detokenize(body.model, list(body.tokens), "tokens")
        text = await arrival.deadline.wait(asking)
        return await json_answer(
            gateway.off_loop, len(text), lambda: {"prompt": text}, arrival.deadline, headers
        )


async def _tokenize(gateway: Gateway, arrival: Arrival) -> Response:
    body = await arrival.read(TokenizeBody)
    headers = await arrival.ignored_header(body)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is needed", "prompt")
    if body.prompt is not None and (body.tools or body.changes_chats):
        raise InvalidRequest("parameters of a conversation need messages", "messages")
    if body.prompt is not None:
        tokens = await gateway.tokenize(body.model, body.prompt, body.add_special_tokens)
    else:
        chat = await arrival.sized(await arrival.generation(body.to_generation))
        tokens = await gateway.tokenize_chat(body.model, chat)
    info = await gateway.infos.ask(gateway.model(body.model))
    found: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": info.max_model_len,
        "tokens": tokens,
    }
    if not body.return_token_strs:
        return await json_answer(
            gateway.off_loop, len(tokens), lambda: found, arrival.deadline, headers
        )
    texts = await _token_texts(gateway, body.model, tokens)

    def with_texts() -> dict[str, Any]:
        return {**found, "token_strs": [texts[token_id] for token_id in tokens]}

    size = 2 * len(tokens)
    return await json_answer(gateway.off_loop, size, with_texts, arrival.deadline, headers)


async def _token_texts(gateway: Gateway, model: str, token_ids: Sequence[int]) -> dict[int, str]:
    """Return the vocabulary's notation of each token, in a mapping that has each token only
    once."""
    distinct = await gateway.off_loop(len(token_ids), _distinct, token_ids)
    found: dict[int, str] = {}
    for start in range(0, len(distinct), _MAX_TOKEN_TEXTS):
        part = distinct[start : start + _MAX_TOKEN_TEXTS]
        found.update(zip(part, await gateway.token_texts(model, part), strict=True))
    return found


def _distinct(token_ids: Sequence[int]) -> list[int]:
    """Return each of the tokens once; lets other threads run now and then."""
    found: set[int] = set()
    for start in range(0, len(token_ids), _MAX_TOKEN_TEXTS):
        found.update(token_ids[start : start + _MAX_TOKEN_TEXTS])
    return list(found)
