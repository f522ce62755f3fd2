"""The answers of a model's tokenizer, however long they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.deadline import Deadline
from deployments.http.metrics import HttpMetrics
from deployments.http.token_routes import add_token_routes
from deployments.off_loop import OffLoop

VOCABULARY = 40_000


class Tokenizing:
    """A gateway to a model that makes ``num_tokens`` of every text."""

    def __init__(self, num_tokens: int) -> None:
        self.http_metrics = HttpMetrics()
        self.config = SimpleNamespace(gateway=SimpleNamespace(strict_requests=False))
        self.off_loop = OffLoop()
        self.infos = SimpleNamespace(ask=self._describe)
        self._tokens = [number % VOCABULARY for number in range(num_tokens)]
        self.asked: list[list[int]] = []

    def deadline(self, _arrived_s: float | None = None) -> Deadline:
        return Deadline(None)

    async def unread_by_template(self, *_arguments: Any) -> frozenset[str]:
        return frozenset()

    async def tokenize(self, *_arguments: Any) -> list[int]:
        return self._tokens

    async def token_texts(self, _model: str, token_ids: list[int]) -> list[str]:
        self.asked.append(token_ids)
        return [f"\u00e9{token_id}" for token_id in token_ids]

    def model(self, _name: str) -> None:
        return None

    async def _describe(self, _model: None) -> Any:
        return SimpleNamespace(max_model_len=1024)


async def asked(num_tokens: int, **fields: Any) -> httpx.Response:
    return await answer_of(Tokenizing(num_tokens), **fields)


async def answer_of(gateway: Any, **fields: Any) -> httpx.Response:
    api = FastAPI()
    add_token_routes(api, gateway)
    transport = httpx.ASGITransport(api)
    async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
        return await client.post("/tokenize", json={"model": "m", "prompt": "a", **fields})


async def longest_halt_s(ask: Callable[[], Any]) -> tuple[float, float]:
    """How long the loop did nothing else at most while it was asked, and how long that took."""
    halts_s = [0.0]

    async def tick() -> None:
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(0.002)
            halts_s.append(time.perf_counter() - start_s)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    start_s = time.perf_counter()
    await ask()
    took_s = time.perf_counter() - start_s
    await asyncio.sleep(0.01)
    task.cancel()
    return max(halts_s), took_s


@pytest.mark.parametrize("num_tokens", [3, 5000])
def test_tokens_of_a_text(num_tokens: int) -> None:
    """With what is ignored in the header."""
    found = asyncio.run(asked(num_tokens, return_token_strs=True, frobnicate=1))
    assert found.headers["x-hdserve-ignored"] == "frobnicate"
    assert found.headers["content-type"] == "application/json"
    assert found.json() == {
        "count": num_tokens,
        "max_model_len": 1024,
        "tokens": [*range(num_tokens)],
        "token_strs": [f"\u00e9{number}" for number in range(num_tokens)],
    }


def test_texts_of_many_tokens_come_in_pieces() -> None:
    """Each once: all of them in one message would hold up every stream, and take half a
    gigabyte."""
    gateway = Tokenizing(100_000)
    found = asyncio.run(answer_of(gateway, return_token_strs=True)).json()
    assert found["token_strs"] == [f"\u00e9{token_id}" for token_id in found["tokens"]]
    assert max(map(len, gateway.asked)) == 16_384
    assert sorted(chain.from_iterable(gateway.asked)) == [*range(VOCABULARY)]


@pytest.mark.parametrize("has_texts", [False, True])
def test_many_tokens_hold_up_nobody(has_texts: bool) -> None:
    """While they are written other answers go on; a busy machine is given three tries."""

    gateway = Tokenizing(2_000_000)

    def ask() -> Any:
        return answer_of(gateway, return_token_strs=has_texts)

    shares = []
    for _ in range(3):
        halt_s, took_s = asyncio.run(longest_halt_s(ask))
        shares.append(halt_s / took_s)
        if shares[-1] < 0.5:
            break
    assert min(shares) < 0.5
