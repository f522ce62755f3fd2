"""Requests of one conversation prefer one replica, and another always answers, too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.generation import GenerationRequest
from deployments.session import session_id
from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
NUM_SLOTS = 2
NUM_SESSIONS = 10


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """Two replicas that take two requests each and queue none."""
    model = {
        "name": MODEL,
        "model": MODEL,
        "num_replicas": 2,
        "num_cpus": 0.2,
        "engine": {"max_num_sequences": NUM_SLOTS, "max_num_queued": 0},
    }
    config = {"models": [model], "model_database": {"is_enabled": False}}
    served = ServedApplication(tmp_path_factory.mktemp("serve"), config)
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop()


def ask(
    application: ServedApplication, messages: list[dict[str, str]], session: str = "", **body: Any
) -> tuple[str, str]:
    """The replica that answered, and its answer."""
    headers = {"x-session-id": session} if session else {}
    fields = {"model": MODEL, "max_tokens": 8, "temperature": 0.0, "messages": messages, **body}
    url = f"{application.base_url}/v1/chat/completions"
    answer = httpx.post(url, json=fields, headers=headers, timeout=120).json()
    replica: str = answer["metrics"]["replica"]
    text: str = answer["choices"][0]["message"]["content"]
    return replica, text


def wait_until_running(application: ServedApplication, replica: str, count: int) -> None:
    """Wait until so many slots of a replica are taken."""
    deadline = time.monotonic() + 60.0
    while num_running(application).get(replica) != count:
        assert time.monotonic() < deadline, f"{count} requests did not come to the replica"
        time.sleep(0.2)


def num_running(application: ServedApplication) -> dict[str, float]:
    """Requests that are decoded, by replica."""
    text = httpx.get(f"{application.base_url}/metrics").text
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:num_requests_running"
    }


def turns(first: str) -> Iterator[list[dict[str, str]]]:
    """A conversation as it grows."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": first}]
    for number in range(3):
        yield list(messages)
        messages.append({"role": "assistant", "content": f"Answer {number}."})
        messages.append({"role": "user", "content": f"And then, for the time {number}?"})


def test_a_conversation_stays_where_it_began(application: ServedApplication) -> None:
    """Without any header: the first messages tell, and conversations are on both replicas."""
    used = set()
    for number in range(NUM_SESSIONS):
        replicas = {
            ask(application, messages)[0] for messages in turns(f"Tell me of city {number}.")
        }
        assert len(replicas) == 1
        used |= replicas
    assert len(used) == 2


def test_the_header_names_the_conversation(application: ServedApplication) -> None:
    """Whatever is asked, the client's own session decides."""
    used = set()
    for session in range(NUM_SESSIONS):
        replicas = {
            ask(application, [{"role": "user", "content": f"{session} {turn}"}], f"s-{session}")[0]
            for turn in range(3)
        }
        assert len(replicas) == 1
        used |= replicas
    assert len(used) == 2


def test_a_full_replica_is_passed_over(application: ServedApplication) -> None:
    """While the preferred replica has no slot the other answers, and just the same."""
    messages = [{"role": "user", "content": "I want to book a table for two in San Jose."}]
    preferred, alone = ask(application, messages, "full")
    long: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(NUM_SLOTS) as pool:
        held = []
        for count in range(NUM_SLOTS):
            wait_until_running(application, preferred, count)
            plain = {"enabled": False}
            held.append(pool.submit(ask, application, messages, "full", speculation=plain, **long))
        wait_until_running(application, preferred, NUM_SLOTS)
        other, text = ask(application, messages, "full")
        assert not any(request.done() for request in held)
    assert {request.result()[0] for request in held} == {preferred}
    assert other != preferred
    assert text == alone


def generation(*messages: tuple[str, str]) -> GenerationRequest:
    found = tuple({"role": role, "content": content} for role, content in messages)
    return GenerationRequest("id", messages=found)


def test_what_makes_a_session() -> None:
    """All up to the first message of the user; the header before that; of a completion nothing."""
    first = generation(("system", "a"), ("user", "b"))
    later = generation(("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"))
    assert session_id("", first) == session_id("", later) != ""
    others = [
        generation(("system", "x"), ("user", "b")),
        generation(("system", "a"), ("user", "x")),
        generation(("user", "ab")),
        generation(("system", "a2 userb")),
    ]
    assert len({session_id("", item) for item in [first, *others]}) == 5
    assert session_id("mine", first) == "mine"
    assert len(session_id("m" * 5000, first)) < 300
    assert session_id("", GenerationRequest("id", prompts=("a text",))) == ""
