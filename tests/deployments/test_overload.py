"""As many requests wait as the configuration says; one more is answered with 429."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deployments.refusals import REMEMBERED_S
from tests.serving import ServedApplication
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
NUM_SLOTS, NUM_QUEUED = 2, 3


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    engine = {"max_num_sequences": NUM_SLOTS, "max_num_queued": NUM_QUEUED}
    config = {
        "models": [{"name": MODEL, "model": MODEL, "aliases": ["mini"], "engine": engine}],
        "model_database": {"is_enabled": False},
    }
    with ServedApplication(tmp_path_factory.mktemp("serve"), config) as served:
        yield served


@pytest.mark.parametrize("is_streamed", [False, True])
def test_overload(application: ServedApplication, is_streamed: bool) -> None:
    """Of sixteen long requests at once some are answered and the others told to come back."""
    body = {
        "model": "mini",
        "prompt": "Once",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": is_streamed,
        "speculation": {"enabled": False},
    }

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{application.base_url}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
        elif is_streamed:
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.json()["usage"]["completion_tokens"] == 300


def test_what_would_never_fit_is_told_so_in_a_storm_too(application: ServedApplication) -> None:
    """Who is told to come later comes for ever."""
    url = f"{application.base_url}/v1/completions"
    full = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "n": 5}

    def ask(number: int) -> tuple[int, int]:
        num_answers = 5 + number % 2
        answer = httpx.post(url, json={**full, "n": num_answers}, timeout=120)
        return num_answers, answer.status_code

    with ThreadPoolExecutor(12) as pool:
        found = set(pool.map(ask, range(24)))
    assert {status for num_answers, status in found if num_answers == 6} == {400}
    assert (5, 429) in found


def test_a_refusal_is_counted_once(application: ServedApplication) -> None:
    """However many answers the request is for, and though room is found to be missing late, as
    for several long prompts that come together.  A gateway asks twice."""
    num_requests = 8
    body = {
        "model": MODEL,
        "prompt": "Once " * 1000,
        "n": NUM_SLOTS + NUM_QUEUED,
        "max_tokens": 30,
        "ignore_eos": True,
    }

    def ask(_: int) -> int:
        return httpx.post(
            f"{application.base_url}/v1/completions", json=body, timeout=120
        ).status_code

    before = rejections(application)
    with ThreadPoolExecutor(num_requests) as pool:
        statuses = Counter(pool.map(ask, range(num_requests)))
    assert set(statuses) == {200, 429}
    assert 0 < rejections(application) - before <= 2 * num_requests


def rejections(application: ServedApplication) -> float:
    text = httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S).text
    found = re.findall(r"^vllm:admission_rejections_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def test_the_queue_is_as_long_as_configured(application: ServedApplication) -> None:
    """Decoded and waiting together: not one more, and not one fewer.  Meanwhile the server is
    ready, says what it does, and takes the next request when one has left."""
    body = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": True,
        "speculation": {"enabled": False},
    }

    async def check() -> None:
        async with httpx.AsyncClient(base_url=application.base_url, timeout=300) as client:

            async def ask() -> int:
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
                    return answer.status_code

            async def wait_for(num_running: int, num_waiting: int) -> None:
                wanted = {"num_running": num_running, "num_waiting": num_waiting}
                while (
                    not wanted.items() <= (await client.get(f"/v1/models/{MODEL}")).json().items()
                ):
                    assert not any(task.done() for task in tasks)
                    await asyncio.sleep(0.05)

            tasks: list[asyncio.Task[int]] = []
            for num_open in range(1, NUM_SLOTS + NUM_QUEUED + 1):
                tasks.append(asyncio.create_task(ask()))
                num_running = min(num_open, NUM_SLOTS)
                await wait_for(num_running, num_open - num_running)
            for _ in range(3):
                assert await ask() == 429
            assert (await client.get("/ready")).status_code == 200
            metrics = (await client.get("/metrics")).text
            assert "\nvllm:num_requests_waiting{" in metrics
            tasks.pop().cancel()
            await wait_for(NUM_SLOTS, NUM_QUEUED - 1)
            await asyncio.sleep(2 * REMEMBERED_S)
            tasks.append(asyncio.create_task(ask()))
            await wait_for(NUM_SLOTS, NUM_QUEUED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())


def test_more_answers_than_ever_fit(application: ServedApplication) -> None:
    """Are an error of the request: to try again later would help nobody."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1, "n": NUM_SLOTS + NUM_QUEUED + 1}
    answer = httpx.post(f"{application.base_url}/v1/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
