"""Replicas draft from what others generated, and no request fails when the actor does."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from actors import model_database
from deployments.session import SESSION_HEADER
from hdserve.databases.snapshot import DatabaseKey
from tests.serving import ServedApplication

pytestmark = pytest.mark.ray

MODEL = "hdserve-mini"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def actor(application: ServedApplication) -> Any:
    """The handle of the model database."""
    url = f"{application.base_url}/v1/models/{MODEL}"
    fingerprint = httpx.get(url, timeout=WAIT_S).json()["tokenizer_fingerprint"]
    return model_database.get(DatabaseKey(MODEL, fingerprint))


def ask(client: openai.OpenAI, text: str) -> tuple[str, str, dict[str, int]]:
    """Replica, answer, and accepted tokens by source, in a conversation of its own: any replica may
    answer it."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        temperature=0.7,
        seed=4,
        max_tokens=80,
        extra_body={"ignore_eos": True},
        extra_headers={SESSION_HEADER: uuid.uuid4().hex},
    )
    metrics = (answer.model_extra or {})["metrics"]
    accepted = metrics["speculative_decoding"]["accepted_by_source"]
    return metrics["replica"], answer.choices[0].message.content or "", accepted


def ask_until_other(client: openai.OpenAI, text: str, replica: str, answer: str) -> dict[str, int]:
    """Ask until another replica than ``replica`` gives ``answer``, for the first time."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        other, found, accepted = ask(client, text)
        assert found == answer
        if other != replica:
            return accepted
    raise AssertionError("one replica answered everything")


def test_a_replica_drafts_from_the_others_output(application: ServedApplication) -> None:
    """What one replica generated is drafted, and accepted, on the other."""
    client = application.client()
    text = "Please find me a train from Bristol to York on the second of May."
    replica, answer, before = ask(client, text)
    wait_for_received(application, 1)
    accepted = ask_until_other(client, text, replica, answer)
    assert accepted.get("model", 0) > before.get("model", 0)
    assert accepted["model"] > 40


def test_a_killed_actor_loses_no_request_and_no_output(
    application: ServedApplication, actor: Any
) -> None:
    """Requests go on while the actor is dead; what it had acknowledged is there again."""
    client = application.client()
    num_before = count(ray.get(actor.info.remote(), timeout=WAIT_S))
    for number in range(3):
        ask(client, f"Tell me about the number {number}.")
    num_outputs = wait_for_outputs(actor, num_before + 3)
    pid = ray.get(actor.info.remote(), timeout=WAIT_S)["pid"]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda n: ask(client, f"What is {n} plus {n}?"), range(12))
        ray.kill(actor, no_restart=False)
        assert len(list(answers)) == 12
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            info = ray.get(actor.info.remote(), timeout=10)
        except ray.exceptions.RayError:
            time.sleep(0.2)
            continue
        if info["pid"] != pid and count(info) >= num_outputs + 12:
            return
        time.sleep(0.2)
    raise AssertionError("the outputs did not come back")


def wait_for_received(application: ServedApplication, num_outputs: int) -> None:
    """Wait until replicas have so many outputs of others."""
    deadline = time.monotonic() + WAIT_S
    labels = {"model_name": MODEL, "direction": "received"}
    while time.monotonic() < deadline:
        text = httpx.get(f"{application.base_url}/metrics", timeout=WAIT_S).text
        found = sum(
            item.value
            for family in text_string_to_metric_families(text)
            for item in family.samples
            if item.name == "hdserve_mirror_outputs_total" and labels.items() <= item.labels.items()
        )
        if found >= num_outputs:
            return
        time.sleep(0.2)
    raise AssertionError(f"{found} outputs were received, not {num_outputs}")


def wait_for_outputs(actor: Any, num_outputs: int) -> int:
    """Wait until the actor has so many; returns how many it has."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = count(ray.get(actor.info.remote(), timeout=WAIT_S))
        if found >= num_outputs:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{found} outputs were published, not {num_outputs}")


def count(info: dict[str, Any]) -> int:
    found: int = info["namespaces"].get("default", {"num_outputs": 0})["num_outputs"]
    return found
