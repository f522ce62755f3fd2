"""A stream that waits for a slot shows that it is alive, through all that is before a gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.server import Server
from tests.ports import free_port
from tests.serving import ServedApplication
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-tiny"
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "ignore_eos": True,
    "speculation": {"enabled": False},
}


@pytest.fixture(params=["serve run", "hdserve serve"])
def application(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A model with one slot, behind Ray Serve's proxy or, on Linux, behind HAProxy."""
    engine = {"max_num_sequences": 1, "compile": False}
    model = {"name": MODEL, "model": MODEL, "engine": engine}
    config = {"models": [model], "gateway": {"stream_keep_alive_s": 0.1}}
    with (
        ServedApplication(tmp_path, config)
        if request.param == "serve run"
        else Server.hdserve(tmp_path, config, free_port())
    ) as served:
        yield served


def num_open(application: Server) -> int:
    """How many sequences the model decodes or lets wait."""
    found = httpx.get(f"{application.base_url}/v1/models/{MODEL}", timeout=WAIT_S).json()
    return int(found["num_running"] + found["num_waiting"])


def wait_for_open(application: Server, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while num_open(application) != number:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_stream_that_waits_is_alive_until_it_is_left(application: Server) -> None:
    """Whoever hangs up leaves the queue, or the slot."""
    url = f"{application.base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=ENDLESS, timeout=WAIT_S) as running:
        lines = (line for line in running.iter_lines() if line.startswith("data: "))
        next(lines)
        with httpx.stream("POST", url, json=ENDLESS, timeout=WAIT_S) as waiting:
            assert waiting.status_code == 200
            signs = waiting.iter_lines()
            assert [next(signs) for _ in range(4)] == [": keep-alive", ""] * 2
            assert num_open(application) == 2
        wait_for_open(application, 1)
        next(lines)
    wait_for_open(application, 0)
