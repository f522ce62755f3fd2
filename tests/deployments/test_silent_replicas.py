"""A replica whose process stands still, as one whose machine has vanished: what it had begun ends
with the reason, what it had not confirmed is answered by others."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from deployments.generation import (
    HEARTBEAT,
    Delta,
    GenerationRequest,
    ModelInfo,
    Records,
    Summary,
)
from deployments.replica.heartbeat import AnswersCalls
from hdserve.config import GatewayConfig
from hdserve.core import DraftCounts
from tests.deployments.gateways import INFO, running_gateway
from tests.marked_processes import standing_still
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAX_SILENCE_S = 2.0
SIGN_S = 0.5
LIMITS = GatewayConfig(max_replica_silence_s=MAX_SILENCE_S, stream_keep_alive_s=SIGN_S)
ROUTER = {
    "request_router_class": "deployments.routers.SessionRouter",
    "request_router_kwargs": {"max_lead": 8, "max_silence_s": MAX_SILENCE_S},
}
NUM_AT_ONCE = 8


class Telling(AnswersCalls):
    """Tells which process it is; then, if the prompt is so, waits for ever and beats."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        assert request.heartbeat_s is not None
        yield (Delta(0, 0, str(os.getpid()), (1,), (0,), None, None),)
        while request.prompts == ("wait",):
            await asyncio.sleep(request.heartbeat_s)
            yield HEARTBEAT
        yield Delta(0, 0, "", (1,), (0,), None, "stop"), Summary(1, 2, DraftCounts(), "r")

    async def tokenize(self, text: str, _adds_special_tokens: bool) -> list[int]:
        """Its process; if the text is a path, written there, and there is no answer."""
        if Path(text).is_absolute():
            Path(text).write_text(str(os.getpid()))
            await asyncio.sleep(3600)
        return [os.getpid()]

    async def describe(self) -> ModelInfo:
        return INFO


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """Where a gateway of a model with two replicas answers."""
    options = {"num_replicas": 2, "max_ongoing_requests": 100, "request_router_config": ROUTER}
    with running_gateway(Telling, limits=LIMITS, **options) as url:
        yield url


def silences(base_url: str) -> float:
    lines = httpx.get(f"{base_url}/metrics", timeout=WAIT_S).text.splitlines()
    found = [line for line in lines if line.startswith("hdserve_replica_silences_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def ask(base_url: str) -> str:
    """Which process answers."""
    body = {"model": "m", "prompt": "hi"}
    answer = httpx.post(f"{base_url}/v1/completions", json=body, timeout=WAIT_S)
    assert answer.status_code == 200
    text: str = answer.json()["choices"][0]["text"]
    return text


def tokenized(base_url: str, text: str = "hi") -> httpx.Response:
    body = {"model": "m", "prompt": text}
    return httpx.post(f"{base_url}/tokenize", json=body, timeout=WAIT_S)


@contextmanager
def waiting(base_url: str) -> Iterator[tuple[int, Iterator[str]]]:
    """A stream that does not end: the process it is of, and its lines from then on."""
    body = {"model": "m", "prompt": "wait", "stream": True}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=WAIT_S) as response:
        lines = filter(None, response.iter_lines())
        event = json.loads(next(lines).removeprefix("data: "))
        yield int(event["choices"][0]["text"]), lines


def test_what_a_silent_replica_had_begun(base_url: str) -> None:
    """It ends with its reason, and is counted once.  Where only nothing is to be sent, nothing
    ends, however long that is."""
    with ExitStack() as stack:
        streams = dict(stack.enter_context(waiting(base_url)) for _ in range(2))
        (pid, lines), (_, other_lines) = streams.items()
        with standing_still(pid):
            *signs, last, end = lines
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_stopped")
        assert "max_replica_silence_s" in error["message"]
        assert end == "data: [DONE]"
        num_signs = int(4 * MAX_SILENCE_S / SIGN_S)
        found = {*signs, *(next(other_lines) for _ in range(num_signs))}
        assert found == {": keep-alive"}
        assert silences(base_url) == 1


def test_what_a_silent_replica_has_not_confirmed(base_url: str) -> None:
    """Another one answers it, and nobody sees a failure."""
    pid, num_before = ask(base_url), silences(base_url)
    with standing_still(int(pid)), ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = set(pool.map(ask, [base_url] * NUM_AT_ONCE))
    assert len(answers - {pid}) == len(answers) == 1
    assert silences(base_url) == num_before


def test_a_text_that_a_silent_replica_had_begun(base_url: str, tmp_path: Path) -> None:
    """It ends with its reason, but not while the replica is there, however long it takes."""
    num_before, file = silences(base_url), tmp_path / "pid"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(tokenized, base_url, str(file))
        eventually(lambda: file.exists() and bool(file.read_text()))
        time.sleep(3 * MAX_SILENCE_S)
        assert not asked.done()
        with standing_still(int(file.read_text())):
            answer = asked.result()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "engine_stopped")
    assert "max_replica_silence_s" in error["message"]
    assert silences(base_url) == num_before + 1


def test_texts_that_a_silent_replica_has_not_confirmed(base_url: str) -> None:
    """As requests to generate."""
    (pid,) = tokenized(base_url).json()["tokens"]
    with standing_still(pid), ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = list(pool.map(tokenized, [base_url] * NUM_AT_ONCE))
    assert {answer.status_code for answer in answers} == {200}
    (other,) = {tuple(answer.json()["tokens"]) for answer in answers}
    assert other != (pid,)
