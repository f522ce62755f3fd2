"""What takes longer than ``gateway.request_timeout_s`` ends everywhere, once, and says why."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.server import START_TIMEOUT_S
from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL, ASLEEP = "hdserve-tiny", "asleep"
WAIT_S = 60.0
NUM_CHOICES = 16
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "n": NUM_CHOICES,
    "ignore_eos": True,
    "speculation": {"enabled": False},
}
"""The model decodes one sequence at a time, so most of its choices wait for the first."""

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**ENDLESS, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {**ENDLESS, "n": 8, "prompt": ["one", "two"], "max_tokens": 2000},
}


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """A model with one slot, and one that has no replica until it is asked."""
    model = {"name": MODEL, "model": MODEL, "engine": {"max_num_sequences": 1}}
    asleep = {"name": ASLEEP, "model": MODEL, "autoscaling": {"min_replicas": 0}}
    config = {"models": [model, asleep], "gateway": {"request_timeout_s": 3}}
    served = ServedApplication(tmp_path_factory.mktemp("serve"), config)
    try:
        wait_for_first_model(served)
        yield served
    finally:
        served.stop()


def wait_for_first_model(served: ServedApplication) -> None:
    """Without asking for the other."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{served.base_url}/v1/models/{MODEL}", timeout=10).is_success:
                return
        time.sleep(0.5)
    raise AssertionError(served.log_path.read_text()[-3000:])


def post(application: ServedApplication, path: str, **fields: Any) -> httpx.Response:
    body = {**BODIES[path], **fields}
    return httpx.post(f"{application.base_url}{path}", json=body, timeout=WAIT_S)


def counters(application: ServedApplication) -> dict[str, float]:
    """How requests ended, once the model does nothing any more."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        text = httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S).text
        found = [item for family in text_string_to_metric_families(text) for item in family.samples]
        if not total(found, "vllm:num_requests_running") + total(
            found, "vllm:num_requests_waiting"
        ):
            return {
                "aborted": total(found, "vllm:request_success_total", finished_reason="abort"),
                "ended": total(found, "vllm:request_success_total"),
                "timeouts": total(found, "hdserve_request_timeouts_total"),
                "504": total(found, "hdserve_http_requests_total", status="504"),
            }
    raise AssertionError("the model goes on")


def total(samples: list[Sample], name: str, **labels: str) -> float:
    found = (item for item in samples if item.name == name)
    return sum(item.value for item in found if labels.items() <= item.labels.items())


def increase(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


def check(response: httpx.Response) -> None:
    """An error in OpenAI's form that clients do not make worse."""
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_timeout")
    assert "request_timeout_s" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer(application: ServedApplication, path: str) -> None:
    """All its choices end at the replica, those that wait for a slot included, each once."""
    before = counters(application)
    check(post(application, path))
    wanted = {"aborted": NUM_CHOICES, "ended": NUM_CHOICES, "timeouts": 1, "504": 1}
    assert increase(counters(application), before) == wanted


@pytest.mark.parametrize("path", BODIES)
def test_a_stream(application: ServedApplication, path: str) -> None:
    """Its last event is the error, as its status had been sent."""
    before = counters(application)
    response = post(application, path, stream=True)
    assert response.status_code == 200
    *lines, end = filter(None, response.text.splitlines())
    assert end == "data: [DONE]"
    *events, last = (json.loads(line.removeprefix("data: ")) for line in lines)
    assert events
    assert all("error" not in event for event in events)
    error = last["error"]
    assert error["code"] == "request_timeout"
    assert "request_timeout_s" in error["message"]
    wanted = {"aborted": NUM_CHOICES, "ended": NUM_CHOICES, "timeouts": 1, "504": 0}
    assert increase(counters(application), before) == wanted


def test_a_client_that_does_not_read(application: ServedApplication) -> None:
    """It keeps no slot; nor does a request that mostly waited for one."""
    before = counters(application)
    url, body = f"{application.base_url}{CHAT}", {**BODIES[CHAT], "stream": True}
    with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        assert next(lines)
        check(post(application, CHAT))
        found = increase(counters(application), before)
    both = 2 * NUM_CHOICES
    assert found == {"aborted": both, "ended": both, "timeouts": 2, "504": 1}


def test_what_is_in_time(application: ServedApplication) -> None:
    """It is answered; and the client of what is not does not ask again."""
    before = counters(application)
    client = application.client().with_options(max_retries=2)
    messages: list[Any] = BODIES[CHAT]["messages"]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=messages, n=NUM_CHOICES, extra_body={"ignore_eos": True}
        )
    assert caught.value.code == "request_timeout"
    found = increase(counters(application), before)
    assert (found["timeouts"], found["504"]) == (1, 1)


def test_a_model_without_a_replica(application: ServedApplication) -> None:
    """What waits in the gateway ends there, and the model starts for the next one."""
    before = counters(application)
    check(post(application, CHAT, model=ASLEEP, stream=True))
    wanted = {"aborted": 0, "ended": 0, "timeouts": 1, "504": 1}
    assert increase(counters(application), before) == wanted
