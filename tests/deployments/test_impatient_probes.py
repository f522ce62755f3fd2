"""A client that is gone takes no answer from others who asked the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest
from ray import serve

from deployments.gateway import gateway_deployment
from deployments.generation import ModelInfo
from deployments.replica.heartbeat import AnswersCalls
from deployments.runtime import actor_options
from hdserve.access import Access
from hdserve.config import ModelConfig, ServeConfig
from tests.clusters import connected_cluster
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = ServeConfig(models=(ModelConfig(name="m", model="m"),))
PATIENCE_S = 60.0


class Slow(AnswersCalls):
    """Says what it is after a while."""

    async def describe(self) -> ModelInfo:
        await asyncio.sleep(0.5)
        return ModelInfo("m", 1024, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")


@pytest.fixture
def base_url() -> Iterator[str]:
    """Where a gateway of a slow model answers."""
    port = free_port()
    model = serve.deployment(ray_actor_options=actor_options(0.1, 1000))(Slow)
    with connected_cluster(2):
        try:
            serve.start(http_options={"port": port})
            serve.run(gateway_deployment(CONFIG, {"m": model.bind()}, Access()))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def test_a_probe_that_gives_up(base_url: str) -> None:
    """Who asks whether the models answer while its question is open, or a moment after, is
    told."""
    url = f"{base_url}/ready"
    assert httpx.get(url, timeout=PATIENCE_S).json() == {"status": "ready", "not_ready": []}
    time.sleep(1.5)  # until that is not known any more
    with pytest.raises(httpx.TimeoutException):
        httpx.get(url, timeout=0.25)
    answers = [httpx.get(url, timeout=PATIENCE_S) for _ in range(2)]
    assert [answer.json()["status"] for answer in answers] == ["ready", "ready"]
