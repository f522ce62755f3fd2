"""A client that does not read its answer ends with the time of its request, like any other."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ray import serve

from deployments.gateway import Gateway
from deployments.generation import Delta, GenerationRequest, Records
from deployments.http.routes import build_api
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from tests.deployments.http.server import Counted, served, unread
from tests.waiting import eventually

TIMEOUT_S, GRACE_S = 2.0, 0.1
TEXT = "x" * 2**16
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


class Endless:
    """Sends more than the buffers on the way to a client hold, and goes on."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        while True:
            yield (Delta(0, 0, TEXT, (1,), (0,), None, None),)
            await asyncio.sleep(0.001)


def ask(address: tuple[str, int], path: str, *, stream: bool = True) -> socket.socket:
    """An answer of which nothing is read yet."""
    body = json.dumps({"model": "m", "stream": stream, **BODIES[path]})
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return unread(address, f"{head}content-length: {len(body)}\r\n\r\n{body}")


@contextmanager
def application(**limits: float) -> Iterator[tuple[Counted, Gateway, tuple[str, int]]]:
    model: Any = serve.run(
        serve.deployment(Endless).bind(), name="endless", _local_testing_mode=True
    )
    models = (ModelConfig(name="m", model="m"),)
    config = ServeConfig(models=models, gateway=GatewayConfig(**limits))
    gateway = Gateway(config, {"m": model})
    app = Counted(build_api(gateway))
    with served(app) as address:
        yield app, gateway, address


def num_timeouts(gateway: Gateway) -> float:
    values = {item.name: item.value for item in gateway.http_metrics.samples()}
    found = values["hdserve_request_timeouts"]
    assert isinstance(found, float | int)
    return found


def is_cut_off(connection: socket.socket) -> bool:
    answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    return not answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", BODIES)
def test_an_unread_stream_ends_soon_after_its_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no slot of the gateway, is counted as one that took too long, and whoever reads it
    after all finds that it has no end."""
    monkeypatch.setattr("deployments.deadline._READING_GRACE_S", GRACE_S)
    with (
        application(request_timeout_s=TIMEOUT_S) as (app, gateway, address),
        ask(address, path) as connection,
    ):
        eventually(lambda: app.num_begun == 1)
        eventually(lambda: app.num_open == 0)
        assert num_timeouts(gateway) == 1
        assert is_cut_off(connection)


@pytest.mark.parametrize("keep_alive_s", [None, 0.05])
def test_a_stream_that_is_not_read_for_long_ends(
    keep_alive_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit for its time, too, and it is no fault of the model."""
    monkeypatch.setattr("deployments.http.keep_alive.MAX_UNREAD_S", GRACE_S)
    limits: Any = {"stream_keep_alive_s": keep_alive_s}
    with (
        application(**limits) as (app, gateway, address),
        ask(address, "/v1/completions") as connection,
    ):
        eventually(lambda: app.num_begun == 1)
        eventually(lambda: app.num_open == 0)
        assert num_timeouts(gateway) == 0
        assert is_cut_off(connection)
