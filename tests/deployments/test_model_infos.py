"""The list of models says what is known, and waits for nobody long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.deadline import Deadline
from deployments.generation import ModelInfo
from deployments.model_infos import ModelInfos
from hdserve.config import AutoscalingConfig, ModelConfig
from hdserve.errors import EngineStopped

A, B, C = (ModelConfig(name=name, model="m") for name in "abc")
D = ModelConfig(name="d", model="m", autoscaling=AutoscalingConfig(min_replicas=0))


def info(name: str, max_model_len: int) -> ModelInfo:
    return ModelInfo(name, max_model_len, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")


class Models:
    """Answers for ``a``; fails once for ``b``; keeps who asks for ``c`` waiting until it is up."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_c_up = asyncio.Event()

    async def call(self, name: str, _method: str) -> ModelInfo:
        self.asked.append(name)
        if name == "b" and self.asked.count("b") < 2:
            raise EngineStopped("the model's replica went away; try again")
        if name == "c":
            await self.is_c_up.wait()
        return info(name, ord(name))


def infos_of(servers: Any, **limits: float) -> ModelInfos:
    return ModelInfos(servers, lambda: None, 60.0, **limits)


def test_a_model_is_asked_until_it_has_answered() -> None:
    """Once if it answers, again if it fails, and never twice at a time."""

    async def run() -> None:
        models = Models()
        infos = infos_of(models, max_wait_s=0.01, keep_s=0)
        assert await infos.context_lengths([A, B, C]) == {"a": 97}
        first, second = await asyncio.gather(
            infos.context_lengths([A, B, C]), infos.context_lengths([C, B])
        )
        assert (first, second) == ({"a": 97, "b": 98}, {"b": 98})
        models.is_c_up.set()
        assert await infos.context_lengths([C]) == {"c": 99}
        assert await infos.context_lengths([A, B, C]) == {"a": 97, "b": 98, "c": 99}
        assert models.asked == ["a", "b", "c", "b"]
        assert await infos.context_lengths([]) == {}

    asyncio.run(run())


def test_a_late_answer_is_heard() -> None:
    """A model that takes longer than who asks whether it answers would wait is not asked anew, and
    its length is known once it has answered."""

    async def run() -> None:
        models = Models()
        infos = infos_of(models, max_wait_s=0.01, timeout_s=0.01)
        assert not await infos.is_ready(C)
        assert await infos.context_lengths([C]) == {}
        assert not await infos.is_ready(C)
        models.is_c_up.set()
        assert await infos.is_ready(C)
        assert await infos.context_lengths([C]) == {"c": 99}
        assert models.asked == ["c"]

    asyncio.run(run())


def test_models_that_would_be_started_are_not_asked() -> None:
    """What they have said before is known."""

    async def run() -> None:
        models = Models()
        infos = infos_of(models)
        assert await infos.context_lengths([A, D]) == {"a": 97}
        await infos.ask(D)
        assert await infos.context_lengths([A, D]) == {"a": 97, "d": 100}
        assert models.asked == ["a", "d"]

    asyncio.run(run())


class Restarting:
    """Describes the replica that is there; what is asked of any one of them, and of all."""

    def __init__(self, *replicas: ModelInfo) -> None:
        self.replicas = replicas
        self.num_asked = 0

    async def call(self, _name: str, _method: str) -> ModelInfo:
        self.num_asked += 1
        if not self.replicas:
            raise EngineStopped("the model's replica went away; try again")
        return self.replicas[0]

    async def call_all(self, *_: Any, may_have_none: bool) -> list[ModelInfo]:
        assert may_have_none
        return list(self.replicas)


def test_a_model_that_woke_is_asked_what_it_is_now() -> None:
    """One that sleeps is left asleep, and still what it was last."""

    async def run() -> None:
        model = Restarting()
        infos = infos_of(model)
        with pytest.raises(EngineStopped, match="has answered yet"):
            await infos.without_waking(D)
        for room in (2048, 1024):
            model.replicas = (info("d", room),)
            assert await infos.without_waking(D) == info("d", room)
            model.replicas = ()
            assert await infos.without_waking(D) == info("d", room)
        assert model.num_asked == 0

    asyncio.run(run())


@pytest.mark.parametrize("model", [A, D])
def test_what_is_known_is_renewed_beside_requests(model: ModelConfig) -> None:
    """By one question for however many of them, and none before the first description; a question
    without an answer takes nothing away."""

    async def run() -> None:
        name = model.name
        servers = Restarting(info(name, 2048))
        infos = infos_of(servers, keep_s=0)
        infos.renew(model)
        await asyncio.sleep(0)
        assert servers.num_asked == 0
        assert await infos.within(model, Deadline()) == info(name, 2048)
        for replicas in ((), (info(name, 1024),)):
            servers.replicas, num_asked = replicas, servers.num_asked
            for _ in range(10):
                infos.renew(model)
            assert await infos.within(model, Deadline()) == info(name, 2048)
            await asyncio.sleep(0.01)
            assert servers.num_asked == num_asked + 1
        assert await infos.within(model, Deadline()) == info(name, 1024)

    asyncio.run(run())


def test_the_last_answer_counts() -> None:
    """Whoever asked: a replica may have room for less than the one it replaces."""

    class Shrinking:
        sizes = iter((2048, 1024))

        async def call(self, name: str, _method: str) -> ModelInfo:
            return info(name, next(self.sizes))

    async def run() -> None:
        infos = infos_of(Shrinking())
        assert await infos.context_lengths([A]) == {"a": 2048}
        assert (await infos.ask(A)).max_model_len == 1024
        assert await infos.within(A, Deadline()) == info("a", 1024)
        assert await infos.context_lengths([A]) == {"a": 1024}

    asyncio.run(run())
