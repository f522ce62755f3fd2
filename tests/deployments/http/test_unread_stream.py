"""A client that does not read its answer ends with the time of its request, like any other."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray import serve

from deployments.gateway import Gateway
from deployments.generation import Delta, GenerationRequest, Records
from deployments.http.routes import build_api
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from tests.deployments.http.server import Counted, served
from tests.waiting import WAIT_S, eventually

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
    """An answer of which nothing is read yet, on a connection with a small buffer."""
    body = json.dumps({"model": "m", "stream": stream, **BODIES[path]})
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT_S)
    connection.connect(address)
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("path", BODIES)
def test_an_unread_stream_ends_soon_after_its_time(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no slot of the gateway, is counted as one that took too long, and whoever reads it
    after all finds that it has no end."""
    monkeypatch.setattr("deployments.deadline._READING_GRACE_S", GRACE_S)
    model: Any = serve.run(
        serve.deployment(Endless).bind(), name="endless", _local_testing_mode=True
    )
    limits = GatewayConfig(request_timeout_s=TIMEOUT_S)
    gateway = Gateway(
        ServeConfig(models=(ModelConfig(name="m", model="m"),), gateway=limits), {"m": model}
    )
    app = Counted(build_api(gateway))
    with served(app) as address, ask(address, path) as connection:
        eventually(lambda: app.num_begun == 1)
        eventually(lambda: app.num_open == 0)
        counts = {item.name: item.value for item in gateway.http_metrics.samples()}
        assert counts["hdserve_request_timeouts"] == 1
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert not answer.endswith(b"0\r\n\r\n")
