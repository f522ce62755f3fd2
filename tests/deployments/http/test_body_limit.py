"""Clients that do not send what they promised keep no place of a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.types import Message

from deployments.gateway import Gateway
from deployments.http import admin, body_limit
from deployments.http.body_limit import MIN_BYTES_PER_S, paced
from deployments.http.routes import build_api
from hdserve.access import read_access
from hdserve.config import AccessConfig, GatewayConfig, default_config
from hdserve.errors import BodyTooSlow
from tests.deployments.http.server import served

KEY = "the-key-of-the-administrator"
DATABASE = "/v1/speculation/databases/hdserve-tiny"
WAIT_S = 60.0


class Importing:
    """A database that reads an archive."""

    async def import_(self, chunks: AsyncIterator[bytes]) -> int:
        return sum([len(chunk) async for chunk in chunks])


async def existing(*_arguments: Any) -> Importing:
    return Importing()


async def answer_to_silence(path: str) -> tuple[Message, Any]:
    """The start and the body of the answer to a request whose body ends after a byte."""
    access = read_access(AccessConfig(admin_key=SecretStr(KEY)))
    api = build_api(Gateway(default_config(), {}, access))
    headers = [(b"content-length", b"1000"), (b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not pieces:
            await asyncio.sleep(WAIT_S)
        return pieces.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(WAIT_S / 2):
        await api({**scope, "query_string": b""}, receive, send)
    return sent[0], json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        f"{DATABASE}/statistics",
        f"{DATABASE}/import",
    ],
)
def test_a_body_that_does_not_come_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every route that reads one, though answers may take as long as they take; nothing of it is
    taken for the next request."""
    monkeypatch.setattr(body_limit, "MAX_SILENCE_S", 0.05)
    monkeypatch.setattr(admin, "_existing", existing)
    start, body = asyncio.run(answer_to_silence(path))
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    if path.startswith("/v1/messages"):
        assert body["error"]["type"] == "timeout_error"
    else:
        assert body["error"]["code"] == "body_too_slow"
        assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize(
    ("path", "limit"),
    [("/v1/chat/completions", "max_body_bytes"), (f"{DATABASE}/import", "max_import_bytes")],
)
def test_a_large_body_is_told_which_limit_it_is_over(
    path: str, limit: str, is_declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the setting, as whoever meets it may be able to change it."""
    monkeypatch.setattr(admin, "_existing", existing)
    config = default_config().model_copy(
        update={"gateway": GatewayConfig(max_body_bytes=2000, max_import_bytes=3000)}
    )
    access = read_access(AccessConfig(admin_key=SecretStr(KEY)))
    content = b" " * 4000 if is_declared else iter([b" " * 4000])
    headers = {"authorization": f"Bearer {KEY}"}
    with served(build_api(Gateway(config, {}, access))) as (host, port):
        answer = httpx.post(f"http://{host}:{port}{path}", content=content, headers=headers)
    assert answer.status_code == 413
    assert f"bytes, which is gateway.{limit} of" in answer.json()["error"]["message"]


async def pieces_of(num_pieces: int, num_bytes: int, pause_s: float) -> AsyncGenerator[Message]:
    for number in range(num_pieces):
        await asyncio.sleep(pause_s)
        has_more = number + 1 < num_pieces
        yield {"type": "http.request", "body": b"a" * num_bytes, "more_body": has_more}
    await asyncio.sleep(pause_s)
    yield {"type": "http.disconnect"}


async def num_received(pieces: AsyncGenerator[Message], pause_s: float = 0.0) -> int:
    """How many messages come, each of which is worked on for ``pause_s``."""
    receive, num_messages = paced(pieces.__anext__), 0
    while (await receive())["type"] == "http.request":
        num_messages += 1
        await asyncio.sleep(pause_s)
    return num_messages


def test_a_body_that_comes_slowly_but_steadily_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes, and however long the answer."""
    monkeypatch.setattr(body_limit, "MAX_SILENCE_S", 1.0)
    pieces = pieces_of(16, MIN_BYTES_PER_S // 8, 0.1)
    assert asyncio.run(num_received(pieces)) == 16


def test_a_byte_now_and_then_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take hours until the body is there."""
    monkeypatch.setattr(body_limit, "MAX_SILENCE_S", 0.5)
    with pytest.raises(BodyTooSlow):
        asyncio.run(num_received(pieces_of(2**20, 1, 0.01)))


def test_a_pause_is_not_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what came fast before it."""
    monkeypatch.setattr(body_limit, "MAX_SILENCE_S", 0.05)

    async def messages() -> AsyncGenerator[Message]:
        yield {"type": "http.request", "body": b"a" * 2**20, "more_body": True}
        await asyncio.sleep(WAIT_S)

    with pytest.raises(BodyTooSlow):
        asyncio.run(num_received(messages()))


def test_work_on_what_came_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the time until the answer is there."""
    monkeypatch.setattr(body_limit, "MAX_SILENCE_S", 0.1)
    assert asyncio.run(num_received(pieces_of(3, 1, 0.0), 0.2)) == 3
