"""A proxy that the environment names is for what is elsewhere: processes of a cluster call each
other past it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from deployments.generation import ModelInfo
from deployments.replica.heartbeat import AnswersCalls
from hdserve.config.deployed import GRPC_VARIABLES
from tests.deployments.gateways import INFO, running_gateway
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

UNREACHED = "http://127.0.0.1:9"


class Described(AnswersCalls):
    """Says what it is."""

    async def describe(self) -> ModelInfo:
        return INFO


@pytest.fixture(params=[{}, {"RAY_SERVE_PROXY_USE_GRPC": "1", **GRPC_VARIABLES}])
def base_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a gateway answers, on a cluster whose environment names a proxy that nobody reaches,
    and gRPC for its own proxies or not."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, UNREACHED)
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    with running_gateway(Described) as url:
        yield url


def test_a_gateway_reaches_its_replicas(base_url: str) -> None:
    """By gRPC, which would ask the proxy unless it is told not to."""
    answer = httpx.get(f"{base_url}/ready", timeout=WAIT_S, trust_env=False)
    assert answer.json() == {"status": "ready", "not_ready": []}
