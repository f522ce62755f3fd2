"""What Ray Serve's proxy answers when no gateway can take another request."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest

from tests.serving import ServedApplication

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-tiny"
NUM_ONGOING, NUM_QUEUED = 2, 3
WAIT_S = 60.0


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    gateway = {"max_ongoing_requests": NUM_ONGOING, "max_queued_requests": NUM_QUEUED}
    config = {"models": [{"name": MODEL, "model": MODEL}], "gateway": gateway}
    with ServedApplication(tmp_path_factory.mktemp("serve"), config) as served:
        yield served


def begin(application: ServedApplication) -> socket.socket:
    """A request whose body does not come."""
    host, port = application.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: 100\r\n\r\n".encode())
    return connection


def eventually(
    application: ServedApplication, status: int, on_waiting: Callable[[], object] = lambda: None
) -> httpx.Response:
    """The first answer with this status; a request that waits in the queue leaves it again.

    Args:
        on_waiting: called after each that has waited.
    """
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{application.base_url}/health", timeout=1)
        except httpx.TimeoutException:
            on_waiting()
            continue
        if answer.status_code == status:
            return answer
        time.sleep(0.1)
    raise AssertionError(f"no answer was {status}")


def test_one_more_than_may_wait_is_refused(application: ServedApplication) -> None:
    """With 429, when to come back, and a line of text, before the gateway knows of it; those
    that wait go on when there is room."""
    with ExitStack() as connections:

        def begin_one() -> None:
            connections.enter_context(begin(application))

        for _ in range(NUM_ONGOING + NUM_QUEUED):
            begin_one()
        refused = eventually(application, 429, begin_one)  # some that came at once were refused
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["content-type"].startswith("text/plain")
        assert refused.text.startswith("Request dropped due to backpressure")
        client = application.client()
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert eventually(application, 200).json() == {"status": "ok"}
    answer = application.client().completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert answer.usage is not None
