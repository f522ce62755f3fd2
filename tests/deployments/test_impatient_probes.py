"""A client that is gone takes no answer from others who asked the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from deployments.generation import ModelInfo
from deployments.replica.heartbeat import AnswersCalls
from tests.deployments.gateways import INFO, running_gateway

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PATIENCE_S = 60.0


class Slow(AnswersCalls):
    """Says what it is after a while."""

    async def describe(self) -> ModelInfo:
        await asyncio.sleep(0.5)
        return INFO


@pytest.fixture
def base_url() -> Iterator[str]:
    """Where a gateway of a slow model answers."""
    with running_gateway(Slow) as url:
        yield url


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
