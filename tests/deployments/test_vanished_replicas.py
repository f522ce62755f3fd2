"""A replica of which nothing comes and whose connections stay open, as those of a machine without
power do: what it had begun ends, what it had not goes elsewhere, and others go on.

Its process is stopped, so that it can also be seen what becomes of one that goes on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import START_TIMEOUT_S
from tests.chaos import processes
from tests.chaos.system import raylet_pid
from tests.clusters import connected_cluster
from tests.marked_processes import standing_still
from tests.serving import ServedApplication
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-tiny"
CHAT = "/v1/chat/completions"
MAX_SILENCE_S = 3.0
SIGN_S = 0.5
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "n": 64,
    "ignore_eos": True,
    "speculation": {"enabled": False},
}
"""A replica decodes one of its choices at a time, which takes minutes altogether."""

RUNNING = "vllm:num_requests_running"
SILENCES = "hdserve_replica_silences_total"
NUM_AT_ONCE = 8


class Replicas:
    """Two replicas of one model behind one gateway."""

    def __init__(self, application: ServedApplication, raylet: int) -> None:
        self.url = f"{application.base_url}{CHAT}"
        self._metrics_url = f"{application.base_url}/metrics"
        self.pids = processes.find("replica", [raylet])

    def series(self, name: str) -> list[float]:
        """The values of a metric."""
        text = httpx.get(self._metrics_url, timeout=WAIT_S).text
        return [
            item.value
            for family in text_string_to_metric_families(text)
            for item in family.samples
            if item.name == name
        ]

    def total(self, name: str) -> float:
        return sum(self.series(name))

    def is_idle(self) -> bool:
        """Whether both answer and do nothing."""
        return self.series(RUNNING) == [0, 0] and not self.total("vllm:num_requests_waiting")


class Stream:
    """A long answer, read in a thread of its own as it comes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_left = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.events: list[dict[str, Any]] = []
        self.num_signs = 0
        self.is_complete = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._thread.join(WAIT_S)

    def leave(self) -> None:
        """Hang up, once something comes."""
        self._is_left = True

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _read(self) -> None:
        body = {**LONG, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=WAIT_S) as response:
            for line in response.iter_lines():
                if self._is_left:
                    return
                if line == "data: [DONE]":
                    self.is_complete = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                elif line.startswith(": "):
                    self.num_signs += 1


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    model = {
        "name": MODEL,
        "model": MODEL,
        "num_replicas": 2,
        "num_cpus": 0.2,
        "session_affinity": False,
        "engine": {"max_num_sequences": 1, "exact": False, "num_threads": 1},
        "drafting": {"drafters": [], "adapts_budget": False},
    }
    limits = {"max_replica_silence_s": MAX_SILENCE_S, "stream_keep_alive_s": SIGN_S}
    config = {"models": [model], "gateway": limits}
    directory = tmp_path_factory.mktemp("serve")
    with (
        connected_cluster(2) as cluster,
        ServedApplication(directory, config, cluster.address) as application,
    ):
        found = Replicas(application, raylet_pid(cluster.head_node))
        assert len(found.pids) == 2
        eventually(found.is_idle, START_TIMEOUT_S)
        yield found


@pytest.fixture
def pair(replicas: Replicas) -> Iterator[tuple[Stream, Stream]]:
    """Two streams under way, one at each replica; the second goes where there is less to do."""
    with Stream(replicas.url) as first:
        eventually(lambda: bool(first.events))
        with Stream(replicas.url) as second:
            eventually(lambda: bool(second.events))
            eventually(lambda: replicas.series(RUNNING) == [1, 1])
            yield first, second
    eventually(replicas.is_idle)


def short_answer(url: str) -> httpx.Response:
    return httpx.post(url, json={**LONG, "n": 1, "max_tokens": 2}, timeout=WAIT_S)


def check_error(error: dict[str, Any]) -> None:
    assert (error["type"], error["code"]) == ("server_error", "engine_stopped")
    assert "max_replica_silence_s" in error["message"]


def test_a_stream_in_its_middle(replicas: Replicas, pair: tuple[Stream, Stream]) -> None:
    """It ends with its reason, which is counted; others go on.  A replica that goes on after all
    drops what nobody waits for."""
    num_before = replicas.total(SILENCES)
    with standing_still(replicas.pids[0]):
        eventually(lambda: any(stream.has_ended for stream in pair))
        lost, other = sorted(pair, key=lambda stream: not stream.has_ended)
        assert lost.is_complete
        *events, last = lost.events
        check_error(last["error"])
        assert all("error" not in event for event in events)
        num_events = len(other.events)
        eventually(lambda: len(other.events) > num_events)
        assert not other.has_ended
        assert replicas.total(SILENCES) == num_before + 1
    eventually(lambda: sorted(replicas.series(RUNNING)) == [0, 1])


def test_an_answer_in_one_piece(replicas: Replicas) -> None:
    """It has the status of a replica that went away."""
    num_before = replicas.total(SILENCES)

    def status() -> int | None:
        try:
            answer = httpx.post(replicas.url, json=LONG, timeout=4 * MAX_SILENCE_S)
        except httpx.ReadTimeout:
            return None
        check_error(answer.json()["error"])
        return answer.status_code

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(status)]
        eventually(lambda: replicas.total(RUNNING) == 1)
        answers.append(pool.submit(status))  # goes where there is less to do
        eventually(lambda: replicas.series(RUNNING) == [1, 1])
        with standing_still(replicas.pids[0]):
            found = [answer.result(WAIT_S) for answer in answers]
    assert sorted(found, key=str) == [503, None]
    assert replicas.total(SILENCES) == num_before + 1
    eventually(replicas.is_idle)


def test_requests_that_were_not_confirmed(replicas: Replicas) -> None:
    """Another replica answers them, however soon after its end a replica was sent them."""
    num_before = replicas.total(SILENCES)
    with standing_still(replicas.pids[0]), ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = list(pool.map(short_answer, [replicas.url] * NUM_AT_ONCE))
    assert {answer.status_code for answer in answers} == {200}
    assert replicas.total(SILENCES) == num_before
    eventually(replicas.is_idle)


def test_a_stream_that_waits(replicas: Replicas, pair: tuple[Stream, Stream]) -> None:
    """For its turn, much longer than a replica may be silent: it is not, and the stream begins when
    there is room."""
    num_before = replicas.total(SILENCES)
    with Stream(replicas.url) as waiting:
        eventually(lambda: waiting.num_signs > 3 * MAX_SILENCE_S / SIGN_S)
        assert not waiting.events
        for stream in pair:
            stream.leave()
        eventually(lambda: bool(waiting.events))
        assert "error" not in waiting.events[0]
    assert replicas.total(SILENCES) == num_before
