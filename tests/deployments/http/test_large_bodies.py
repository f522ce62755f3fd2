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
from deployments.off_loop import OffLoop
from deployments.openai import request_body
from deployments.openai.protocol import ChatBody, CompletionBody, TokenizeBody
from deployments.openai.request_body import OfferedBody
from hdserve.access import Identity

MESSAGES = [{"role": "user", "content": "a" * 2**16}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a" * 2**16},
    "/v1/responses": {"input": "a" * 2**16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
}


class Enough(Exception):
    """Nothing more is asked of the gateway."""


async def no_parser(*_arguments: Any, **_options: Any) -> None:
    return None


async def nothing(*_arguments: Any) -> frozenset[str]:
    return frozenset()


async def ask(path: str) -> None:
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
        await client.post(path, json={"model": "m", **REQUESTS[path]})


@pytest.mark.parametrize("path", REQUESTS)
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


@pytest.mark.parametrize("path", REQUESTS)
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
