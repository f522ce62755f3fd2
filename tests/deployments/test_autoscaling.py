"""Replicas of one model come and go with its load, and the other model is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import ServedApplication
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

SCALED, OTHER, SLEEPING, DOZING = "scaled", "other", "sleeping", "dozing"
QUESTION = [{"role": "user", "content": "Please find me a train from Bristol to York in May."}]
ADMIN_KEY = "the-key-of-the-administrator"
OF_ALL_MODELS = ("id", "object", "created", "owned_by", "root")
OF_ALL_MODELS += ("type", "display_name", "created_at")
WAIT_S = 240.0
TEMPLATE = """{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.content }}
{% endfor %}"""


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    directory = tmp_path_factory.mktemp("serve")
    template = directory / "tools.jinja"
    template.write_text(TEMPLATE)
    base = {"model": "hdserve-mini", "num_cpus": 0.1, "drafting": {"adapts_budget": False}}
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 5.0,
        "look_back_period_s": 4.0,
    }
    scaled = {**base, "name": SCALED, "autoscaling": autoscaling}
    asleep = {**base, "autoscaling": {**autoscaling, "min_replicas": 0}}
    config = {
        "models": [
            scaled,
            {**base, "name": OTHER},
            {**asleep, "name": SLEEPING},
            {**asleep, "name": DOZING, "chat_template": str(template)},
        ],
        "access": {"admin_key": ADMIN_KEY},
        "gateway": {"stream_keep_alive_s": 0.5},
    }
    with ServedApplication(directory, config) as served:
        yield served


def replicas(application: ServedApplication, model: str) -> set[str]:
    """Replicas of a model that report their slots now."""
    text = httpx.get(f"{application.base_url}/metrics", timeout=60).text
    return {
        sample.labels["engine"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "hdserve_slots" and sample.labels["model_name"] == model
    }


def ask(application: ServedApplication, session: str, **body: Any) -> dict[str, Any]:
    fields = {"model": SCALED, "messages": QUESTION, "max_tokens": 80, "ignore_eos": True, **body}
    url = f"{application.base_url}/v1/chat/completions"
    headers = {"x-session-id": session}
    answer: dict[str, Any] = httpx.post(url, json=fields, headers=headers, timeout=240).json()
    return answer


def listed(application: ServedApplication, model: str) -> dict[str, Any]:
    """The database of a model, in the list of all."""
    url = f"{application.base_url}/v1/speculation/databases"
    answer = httpx.get(url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60).json()
    (found,) = [item for item in answer["data"] if item["id"] == model]
    return dict(found)


def test_replicas_follow_the_load(application: ServedApplication) -> None:
    """One becomes two under load and two become one after it, without a failed request; what the
    first one wrote is drafted by the new one in its first request."""
    (first,) = replicas(application, SCALED)
    others = replicas(application, OTHER)
    alone = ask(application, "warm", temperature=0.0)
    assert alone["metrics"]["replica"] == first

    is_over = Event()

    def load(number: int) -> list[dict[str, Any]]:
        answers = []
        while not is_over.is_set():
            answers.append(ask(application, f"load-{number}", temperature=0.0))
        return answers

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, number) for number in range(8)]
        try:
            eventually(lambda: len(replicas(application, SCALED)) == 2, WAIT_S, pause_s=0.5)
        finally:
            is_over.set()
        answers = [item.result() for item in loads]
    for answer in (answer for of_thread in answers for answer in of_thread):
        assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    firsts = [
        next((answer for answer in of_thread if answer["metrics"]["replica"] != first), None)
        for of_thread in answers
    ]
    assert any(firsts)
    for answer in filter(None, firsts):
        accepted = answer["metrics"]["speculative_decoding"]["accepted_by_source"]
        assert accepted["model"] > 40

    eventually(lambda: len(replicas(application, SCALED)) == 1, WAIT_S, pause_s=0.5)
    assert replicas(application, OTHER) == others
    assert "choices" in ask(application, "after", temperature=0.0)


def test_a_model_without_replicas_is_woken_by_a_request_alone(
    application: ServedApplication,
) -> None:
    """Readiness, metrics and the list of databases, asked for all the time, neither start it nor
    keep it from ending; its database is listed once it was there."""

    def has_replicas() -> bool:
        assert httpx.get(f"{application.base_url}/ready", timeout=60).status_code == 200
        listed(application, SLEEPING)
        return bool(replicas(application, SLEEPING))

    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    place = f"{application.base_url}/v1/speculation/databases/{SLEEPING}/statistics"
    model = f"{application.base_url}/v1/models/{SLEEPING}"
    assert not has_replicas()
    assert "error" in listed(application, SLEEPING)
    assert httpx.get(place, headers=admin, timeout=60).json()["replicas"] == []
    assert httpx.get(model, timeout=60).json().keys() == {*OF_ALL_MODELS}
    assert not has_replicas()
    answer = ask(application, "wake", model=SLEEPING)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert has_replicas()
    eventually(lambda: not has_replicas(), WAIT_S, pause_s=0.5)
    assert listed(application, SLEEPING)["namespaces"]["default"]["num_outputs"] == 1
    url = f"{application.base_url}/v1/speculation/databases/{SLEEPING}"
    with httpx.Client(headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60) as client:
        assert client.get(url).json()["namespaces"]["default"]["num_outputs"] == 1
        archive = client.get(f"{url}/export").content
        flushed = client.delete(url, params={"namespace": "default"}).json()
        assert flushed["num_outputs"] == 1
        imported = client.post(f"{url}/import", content=archive).json()
        assert imported == {"num_new_outputs": 1}
    assert httpx.get(model, timeout=60).json().keys() > {*OF_ALL_MODELS}
    assert not has_replicas()

    def is_checked() -> bool:
        wrong = httpx.post(place, headers=admin, json={"directory": "../a"}, timeout=60)
        return wrong.status_code == 400

    eventually(is_checked, WAIT_S, pause_s=0.5)


def test_whoever_wakes_a_model_hears_that_the_gateway_is_there(
    application: ServedApplication,
) -> None:
    """While it is loaded; also where the answer depends on what the model is."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    bodies: list[dict[str, Any]] = [{}, {"tools": tools}]

    def lines(fields: dict[str, Any]) -> list[str]:
        body = {"model": DOZING, "messages": QUESTION, "max_tokens": 4, "stream": True, **fields}
        url = f"{application.base_url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as answer:
            assert answer.status_code == 200
            return [line for line in answer.iter_lines() if line]

    assert not replicas(application, DOZING)
    with ThreadPoolExecutor(len(bodies)) as pool:
        for found in pool.map(lines, bodies):
            assert found[0] == ": keep-alive"
            assert found[-1] == "data: [DONE]"
            assert "error" not in found[-2]
