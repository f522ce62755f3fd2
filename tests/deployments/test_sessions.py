"""Requests of one conversation prefer one replica, and another always answers, too."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from deployments.generation import GenerationRequest
from deployments.session import session_id
from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"
NUM_SLOTS = 2
NUM_SESSIONS = 10

Messages = list[dict[str, str]]
Events = Iterator[dict[str, Any]]


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
        wait_for_replicas(served)
        yield served
    finally:
        served.stop()


def ask(
    application: ServedApplication, messages: Messages, session: str = "", **body: Any
) -> tuple[str, str]:
    """The replica that answered, and its answer."""
    headers = {"x-session-id": session} if session else {}
    fields = {"model": MODEL, "max_tokens": 8, "temperature": 0.0, "messages": messages, **body}
    url = f"{application.base_url}/v1/chat/completions"
    answer = httpx.post(url, json=fields, headers=headers, timeout=120).json()
    replica: str = answer["metrics"]["replica"]
    text: str = answer["choices"][0]["message"]["content"]
    return replica, text


def wait_for_replicas(application: ServedApplication) -> None:
    """Wait until the gateway knows both replicas; the first one makes it ready."""
    deadline = time.monotonic() + 120.0
    used: set[str] = set()
    while len(used) < 2:
        assert time.monotonic() < deadline, "the second replica did not come"
        question = [{"role": "user", "content": f"Hello {time.monotonic_ns()}"}]
        used.add(ask(application, question)[0])


@contextmanager
def held(application: ServedApplication, messages: Messages, session: str) -> Iterator[Events]:
    """A stream that has begun and goes on for long; the rest of its events."""
    fields = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"enabled": False},
    }
    url = f"{application.base_url}/v1/chat/completions"
    headers = {"x-session-id": session}
    with httpx.stream("POST", url, json=fields, headers=headers, timeout=240) as answer:
        events = (
            json.loads(line.removeprefix("data: "))
            for line in answer.iter_lines()
            if line.startswith("data: {")
        )
        next(events)
        yield events


def turns(first: str) -> Iterator[Messages]:
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
    with ExitStack() as stack:
        streams = [
            stack.enter_context(held(application, messages, "full")) for _ in range(NUM_SLOTS)
        ]
        other, text = ask(application, messages, "full")
        ends = [list(events)[-1] for events in streams]
    assert {end["metrics"]["replica"] for end in ends} == {preferred}
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
