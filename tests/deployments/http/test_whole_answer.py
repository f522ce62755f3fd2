"""A large answer that is not streamed takes a place of the gateway until its client has read it,
and does not stay for ever if it never does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ray import serve

from deployments.gateway import Gateway
from deployments.generation import Delta, GenerationRequest, Records, Summary
from deployments.http.routes import build_api
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from hdserve.core import DraftCounts
from tests.deployments.http.server import Counted, served
from tests.deployments.http.test_unread_stream import BODIES, ask
from tests.waiting import eventually

TEXT = "\u00e9" * 2**23
SHORT_S = 0.2


class Long:
    """Answers more than the buffers on the way to a client hold."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        yield (Delta(0, 0, TEXT, (1,), (0,), None, "stop"),)
        yield (Summary(1, 1, DraftCounts(), "r"),)


@contextmanager
def application(**limits: Any) -> Iterator[tuple[Counted, tuple[str, int]]]:
    model: Any = serve.run(serve.deployment(Long).bind(), name="long", _local_testing_mode=True)
    config = ServeConfig(
        models=(ModelConfig(name="m", model="m"),), gateway=GatewayConfig(**limits)
    )
    app = Counted(build_api(Gateway(config, {"m": model})))
    with served(app) as address:
        yield app, address


def rest_of(connection: Any) -> tuple[str, bytes]:
    """The head and the body of the answer on a connection."""
    received = bytearray()
    while b"\r\n\r\n" not in received:
        received += connection.recv(2**16)
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    num_bytes = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    pieces = [body]
    num_bytes -= len(body)
    while num_bytes and (piece := connection.recv(2**20)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return head.decode(), b"".join(pieces)


@pytest.mark.parametrize("path", BODIES)
def test_one_that_is_read_late_is_complete(path: str) -> None:
    """And is open until then."""
    with application() as (app, address), ask(address, path, stream=False) as connection:
        first = connection.recv(1)
        assert app.num_open == 1
        head, body = rest_of(connection)
        assert (first.decode() + head).startswith("HTTP/1.1 200")
        assert TEXT in json.dumps(json.loads(body), ensure_ascii=False)
        eventually(lambda: app.num_open == 0)


@pytest.mark.parametrize("is_timed", [True, False])
def test_one_that_is_never_read_ends(is_timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after the time of its request, or when nothing has been read for long."""
    if is_timed:
        monkeypatch.setattr("deployments.deadline._READING_GRACE_S", SHORT_S)
        limits = {"request_timeout_s": 5.0}
    else:
        monkeypatch.setattr("deployments.http.unread_limit.MAX_UNREAD_S", SHORT_S)
        limits = {}
    with (
        application(**limits) as (app, address),
        ask(address, "/v1/completions", stream=False) as connection,
    ):
        assert connection.recv(1)
        eventually(lambda: app.num_open == 0)
        with pytest.raises(json.JSONDecodeError):
            json.loads(rest_of(connection)[1])
