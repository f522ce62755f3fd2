"""A proxy that the environment names is for what is elsewhere: processes of a cluster call each
other past it."""

from __future__ import annotations

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
from hdserve.config.deployed import GRPC_VARIABLES
from tests.clusters import connected_cluster
from tests.ports import free_port
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = ServeConfig(models=(ModelConfig(name="m", model="m"),))
UNREACHED = "http://127.0.0.1:9"


class Described(AnswersCalls):
    """Says what it is."""

    async def describe(self) -> ModelInfo:
        return ModelInfo("m", 1024, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")


@pytest.fixture(params=[{}, {"RAY_SERVE_PROXY_USE_GRPC": "1", **GRPC_VARIABLES}])
def base_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a gateway answers, on a cluster whose environment names a proxy that nobody reaches,
    and gRPC for its own proxies or not."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, UNREACHED)
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    model = serve.deployment(ray_actor_options=actor_options(0.1, 1000))(Described)
    with connected_cluster(2):
        try:
            serve.start(http_options={"port": port})
            serve.run(gateway_deployment(CONFIG, {"m": model.bind()}, Access()))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def test_a_gateway_reaches_its_replicas(base_url: str) -> None:
    """By gRPC, which would ask the proxy unless it is told not to."""
    answer = httpx.get(f"{base_url}/ready", timeout=WAIT_S, trust_env=False)
    assert answer.json() == {"status": "ready", "not_ready": []}
