"""What is done with a large body is not done in the event loop of the gateway."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from deployments.deadline import Deadline
from deployments.http.completion_routes import add_completion_routes
from deployments.http.messages_route import add_messages_routes
from deployments.http.responses_route import add_responses_route
from deployments.http.token_routes import add_token_routes
from deployments.off_loop import MAX_INLINE_SIZE, OffLoop
from deployments.openai import request_body
from deployments.openai.protocol import ChatBody, CompletionBody, TokenizeBody
from deployments.openai.request_body import OfferedBody
from hdserve.access import Identity

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
)


class Enough(Exception):
    """Nothing more is asked of the gateway."""


async def no_parser(*_arguments: Any, **_options: Any) -> None:
    return None


async def nothing(*_arguments: Any) -> frozenset[str]:
    return frozenset()


def body_of(path: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    fields: dict[str, Any] = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
    }.get(path, {"messages": messages})
    return {"model": "m", **fields}


async def ask(path: str, num_bytes: int = 2**16) -> None:
    api = FastAPI()
    gateway: Any = SimpleNamespace(
        off_loop=OffLoop(),
        deadline=Deadline,
        tool_parser=no_parser,
        unread_by_template=nothing,
        config=SimpleNamespace(gateway=SimpleNamespace(strict_requests=False)),
        http_metrics=SimpleNamespace(ignored=lambda _number: None),
    )
    for add in (add_completion_routes, add_messages_routes, add_responses_route, add_token_routes):
        add(api, gateway)

    async def signed_in(scope: Scope, receive: Receive, send: Send) -> None:
        await api({**scope, "state": {"identity": Identity()}}, receive, send)

    transport = httpx.ASGITransport(signed_in)
    async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
        await client.post(path, json=body_of(path, "a" * num_bytes))


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies_are_read_in_threads(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its values to what the model is asked for."""
    threads = []
    parse = request_body.parse_body

    def parse_body(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*arguments)

    def to_generation(*_arguments: Any) -> None:
        threads.append(threading.get_ident())
        raise Enough

    monkeypatch.setattr(request_body, "parse_body", parse_body)
    for kind in (ChatBody, CompletionBody, TokenizeBody):
        monkeypatch.setattr(kind, "to_generation", to_generation)
    with pytest.raises(Enough):
        asyncio.run(ask(path))
    assert len(threads) >= 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("path", PATHS)
def test_what_may_have_grammars_is_made_in_threads(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 1,400 tools in 64 KiB would hold up all other answers for a third of a second."""
    threads = []

    def to_generation(*_arguments: Any) -> None:
        threads.append(threading.get_ident())
        raise Enough

    for kind in (ChatBody, CompletionBody, TokenizeBody):
        monkeypatch.setattr(kind, "to_generation", to_generation)
    for num_bytes in (MAX_INLINE_SIZE - 500, MAX_INLINE_SIZE):
        with pytest.raises(Enough):
            asyncio.run(ask(path, num_bytes))
    short, long = threads
    assert short == threading.get_ident() != long


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies_are_looked_through_in_threads(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For fields that nobody documents, in each of their parts."""
    threads = []

    def undocumented_inside(_body: OfferedBody) -> None:
        threads.append(threading.get_ident())
        raise Enough

    monkeypatch.setattr(OfferedBody, "undocumented_inside", undocumented_inside)
    with pytest.raises(Enough):
        asyncio.run(ask(path))
    assert threads
    assert threading.get_ident() not in threads
