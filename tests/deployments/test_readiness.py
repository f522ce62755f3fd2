"""Whoever wants to know whether models answer, few questions are asked."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from ray import serve

from deployments.gateway import Gateway
from deployments.generation import ModelInfo
from deployments.http.routes import build_api
from deployments.model_infos import ModelInfos
from deployments.replica.heartbeat import AnswersCalls
from hdserve.config import ModelConfig, ServeConfig
from hdserve.errors import EngineStopped
from tests.deployments.gateways import INFO

MODEL = ModelConfig(name="m", model="m")
CONFIG = ServeConfig(models=(MODEL,))


class Counting:
    """Describes itself, and counts how often; fails where nothing is left of ``answers``."""

    def __init__(self, answers: int = 10**9) -> None:
        self._answers = answers
        self.num_asked = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def call(self, _name: str, _method: str) -> ModelInfo:
        self.num_asked += 1
        await self.is_open.wait()
        if self.num_asked > self._answers:
            raise EngineStopped("the model's replica went away; try again")
        return INFO


def infos_of(servers: Any, **limits: float) -> ModelInfos:
    return ModelInfos(servers, lambda: None, 60.0, **limits)


def test_many_who_ask_at_once_are_one_question() -> None:
    """Those who go away take nothing from the others."""

    async def run() -> None:
        model = Counting()
        model.is_open.clear()
        readiness = infos_of(model, timeout_s=60, keep_s=60)
        asking = [asyncio.create_task(readiness.is_ready(MODEL)) for _ in range(100)]
        await asyncio.sleep(0)
        asking.pop(0).cancel()
        await asyncio.sleep(0)
        model.is_open.set()
        assert all(await asyncio.gather(*asking))
        assert await readiness.is_ready(MODEL)
        assert model.num_asked == 1

    asyncio.run(run())


def test_an_answer_is_kept_for_a_moment() -> None:
    """Then another one is asked for; that there is none is kept as well."""

    async def run() -> None:
        model = Counting(answers=1)
        readiness = infos_of(model, keep_s=0.05)
        while await readiness.is_ready(MODEL):
            await asyncio.sleep(0.01)
        assert model.num_asked == 2
        kept = infos_of(model, keep_s=60)
        assert [await kept.is_ready(MODEL) for _ in range(3)] == [False] * 3
        assert model.num_asked == 3

    asyncio.run(run())


def test_a_silent_model_is_not_ready() -> None:
    """Nobody waits longer than for the question that is open."""

    async def run() -> None:
        model = Counting()
        model.is_open.clear()
        readiness = infos_of(model, timeout_s=0.01, keep_s=60)
        found = await asyncio.gather(*(readiness.is_ready(MODEL) for _ in range(10)))
        assert found == [False] * 10
        assert model.num_asked == 1

    asyncio.run(run())


class Once(AnswersCalls):
    """Answers one question, and no more."""

    def __init__(self) -> None:
        self._is_asked = False

    async def describe(self) -> ModelInfo:
        if self._is_asked:
            raise EngineStopped("the replica was asked twice")
        self._is_asked = True
        await asyncio.sleep(0)
        return INFO


def test_clients_without_a_key_take_one_slot_together() -> None:
    """However many of them ask the gateway whether it is ready."""
    application = serve.deployment(Once).bind()
    handle: Any = serve.run(application, name="once", _local_testing_mode=True)
    transport = httpx.ASGITransport(build_api(Gateway(CONFIG, {"m": handle})))

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
            return await asyncio.gather(*(client.get("/ready") for _ in range(20)))

    assert {answer.status_code for answer in asyncio.run(run())} == {200}
