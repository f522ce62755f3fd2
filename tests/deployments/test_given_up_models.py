"""A model that Ray Serve gives up while requests wait for its first replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from deployments.generation import GenerationRequest, Records
from deployments.replica.heartbeat import AnswersCalls
from hdserve.config import GatewayConfig
from tests.deployments.gateways import running_gateway
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LIMITS = GatewayConfig(max_replica_silence_s=2.0)
ASLEEP = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0.0}


class Broken(AnswersCalls):
    """Cannot start."""

    def __init__(self) -> None:
        raise RuntimeError("the model is damaged")

    async def generate(self, _request: GenerationRequest) -> AsyncIterator[Records]:
        """Yield nothing."""
        for _ in ():
            yield ()


@pytest.fixture
def base_url() -> Iterator[str]:
    """Where a gateway of a model answers that is only started by a request."""
    options = {"autoscaling_config": ASLEEP, "max_constructor_retry_count": 1}
    with running_gateway(Broken, limits=LIMITS, **options) as url:
        yield url


def test_who_waits_for_a_model_that_is_given_up_is_told(base_url: str) -> None:
    """As those are who ask for it afterwards."""
    for _ in range(2):
        body = {"model": "m", "prompt": "hi"}
        answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=WAIT_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
        assert "went away" in answer.json()["error"]["message"]
