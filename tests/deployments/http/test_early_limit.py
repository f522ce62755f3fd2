"""What is over the limit of a body takes no memory while its request waits for a slot."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from ray.serve._private.http_util import _apply_middlewares
from ray.serve._private.utils import call_function_from_import_path
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from deployments.gateway import Gateway
from deployments.http.arrival import Arrival
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from hdserve.config.deployed import PROXY_VARIABLES

KEY, ADMIN_KEY = "a-key-of-the-tests", "the-key-of-the-administrator"
LIMITS = GatewayConfig(max_body_bytes=100_000, max_import_bytes=1_000_000)
CONFIG = ServeConfig(models=(ModelConfig(name="m", model="m"),), gateway=LIMITS)
PIECE = b"x" * 2**15
GENERATE = "/v1/completions"
IMPORT = "/v1/nothing/import"
"""Ends as the path of an archive does; what is kept of a body goes by that."""


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Waiting:
    """A request that gets its slot when Ray Serve has read all its client sends.

    Attributes:
        kept: the pieces of the body that were kept until then.
    """

    def __init__(self, access: Access) -> None:
        self.gateway = Gateway(CONFIG, {}, access)
        self._api = build_api(self.gateway)
        self.kept: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_read = asyncio.Event()

        async def noted() -> Message:
            message = await receive()
            self.kept.append(message.get("body", b""))
            if not message.get("more_body", False):
                is_read.set()
            return message

        proxy = ASGIDIReceiveProxy(scope, noted, asyncio.get_running_loop())
        reading = proxy.fetch_until_disconnect_task()
        await is_read.wait()
        await self._api(scope, proxy, send)
        reading.cancel()


def served(app: Any, gateway: object) -> Any:
    """As Ray Serve does it in the process of a gateway, or in one where there is none."""
    (path,) = PROXY_VARIABLES.values()
    whole = _apply_middlewares(app, call_function_from_import_path(path))

    async def in_process(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.MonkeyPatch.context() as patch:
            context = gateway and SimpleNamespace(servable_object=gateway)
            patch.setattr("ray.serve.context._INTERNAL_REPLICA_CONTEXT", context)
            await whole(scope, receive, send)

    return in_process


def post(waiting: Waiting, path: str, key: str, pieces: Iterable[bytes]) -> httpx.Response:
    """Send a body without a declared length."""

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(served(waiting, waiting.gateway))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
            return await client.post(path, content=sent(), headers=headers)

    return asyncio.run(answer())


KEYS = Access((ApiKey(digest(KEY), "default"),), digest(ADMIN_KEY))


@pytest.mark.parametrize(
    ("access", "path", "key", "status", "max_kept"),
    [
        (Access(), GENERATE, "", 413, LIMITS.max_body_bytes),
        (KEYS, GENERATE, KEY, 413, LIMITS.max_body_bytes),
        (KEYS, IMPORT, KEY, 404, LIMITS.max_body_bytes),
        (KEYS, IMPORT, ADMIN_KEY, 404, LIMITS.max_import_bytes),
        (KEYS, GENERATE, "", 401, 0),
        (KEYS, IMPORT, "wrong", 401, 0),
    ],
)
def test_no_more_is_kept_than_is_read(
    access: Access, path: str, key: str, status: int, max_kept: int
) -> None:
    """The client is told by the application, whatever it sent; without a key that is needed, one
    piece is kept."""
    waiting = Waiting(access)
    answer = post(waiting, path, key, [PIECE] * 200)
    assert answer.status_code == status
    assert sum(map(len, waiting.kept)) <= max_kept + len(PIECE)


def test_what_is_within_the_limit_arrives() -> None:
    """Small pieces as larger ones, of which there are few."""
    waiting = Waiting(Access())
    body = b'{"model": "unknown", "prompt": "' + b"x" * 50_000 + b'"}'
    answer = post(waiting, GENERATE, "", (bytes([byte]) for byte in body))
    assert answer.status_code == 404
    assert b"".join(waiting.kept) == body
    assert len(waiting.kept) < 10


def seen(gateway: object, num_pieces: int) -> list[str]:
    """The types of the messages that come of a client that sends so many pieces, and goes away."""
    pieces = [{"type": "http.request", "body": PIECE, "more_body": True}] * num_pieces
    messages: Iterator[Message] = iter([*pieces, {"type": "http.disconnect"}])
    types: list[str] = []

    async def receive() -> Message:
        return next(messages)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while "http.disconnect" not in types:
            types.append((await receive())["type"])

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "path": GENERATE, "headers": []}
    asyncio.run(served(app, gateway)(scope, receive, send))
    return types


def test_a_client_that_goes_away_is_noticed() -> None:
    """Also while what it sends is thrown away."""
    assert seen(Gateway(CONFIG, {}, KEYS), 20) == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("other", [None, object()])
def test_where_there_is_no_gateway_all_is_passed_on(other: object) -> None:
    """A proxy of Ray Serve knows no limits, and other applications have their own."""
    assert seen(other, 20) == ["http.request"] * 20 + ["http.disconnect"]


LARGE = 90_000


def length_of(declared: int | None) -> list[tuple[bytes, bytes]]:
    if declared is None:
        return [(b"transfer-encoding", b"chunked")]
    return [(b"content-length", b"%d" % declared)]


ROOM = GatewayConfig(max_body_bytes=100_000, max_held_body_bytes=200_000)


def with_room(access: Access, **others: Any) -> Gateway:
    limits = GatewayConfig(**{**ROOM.model_dump(exclude_unset=True), **others})
    return Gateway(ServeConfig(models=CONFIG.models, gateway=limits), {}, access)


@pytest.mark.parametrize(
    ("declared", "num_sent", "num_held"),
    [
        (LARGE, LARGE, 2),
        (None, LARGE, 2),
        (1 << 40, LARGE, 2),
        (50_000, 50_000, 5),
        (None, 50_000, 5),
        (0, 0, 5),
    ],
)
def test_no_more_bodies_are_read_than_there_is_room_for(
    declared: int | None, num_sent: int, num_held: int
) -> None:
    """By their declared lengths, and where there is none by the limit until they are read; as
    requests end, all others are read.  Who has no key, where one is needed, takes no room."""
    assert most_read_at_a_time(with_room(Access()), declared, num_sent) == num_held
    assert most_read_at_a_time(with_room(KEYS), declared, num_sent) == 5


def test_waiting_for_room_has_an_end() -> None:
    """That of the request.  It is told so as of any other error, and what is read of its body takes
    no room."""
    origin = "https://page.example"
    gateway = with_room(Access(), request_timeout_s=0.01, allowed_origins=(origin,))
    api = build_api(gateway)
    pieces: list[Message] = [
        {"type": "http.request", "body": PIECE, "more_body": has_more} for has_more in (False, True)
    ]
    sent: list[Message] = []
    num_kept = 0

    async def receive() -> Message:
        return pieces.pop()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_kept
        while pieces:
            num_kept += len((await receive())["body"])
        await api(scope, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        headers = [*length_of(LARGE), (b"origin", origin.encode())]
        scope = {"type": "http", "method": "POST", "path": GENERATE, "headers": headers}
        async with asyncio.timeout(10), gateway.body_room.held(200_000):
            await served(app, gateway)({**scope, "query_string": b""}, receive, send)

    asyncio.run(ask())
    assert num_kept == len(PIECE)
    headers = Headers(raw=sent[0]["headers"])
    assert (sent[0]["status"], headers["x-should-retry"]) == (504, "false")
    assert headers["x-request-id"]
    assert headers["access-control-allow-origin"] == origin
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == "request_timeout"
    assert "no room for the body" in error["message"]
    samples = gateway.http_metrics.samples()
    counted = {item.labels: item.value for item in samples if item.name == "hdserve_http_requests"}
    assert counted[GENERATE, "504"] == 1


def test_waiting_for_room_is_a_part_of_the_time_of_a_request() -> None:
    """It has one deadline."""
    gateway = with_room(Access(), request_timeout_s=600)
    left_s: list[float] = []

    async def unused(*_message: Message) -> Any:
        raise AssertionError

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        left_s.append(Arrival(gateway, Request(scope)).deadline.remaining_s)

    async def ask() -> None:
        scope = {"type": "http", "path": GENERATE, "headers": length_of(LARGE)}
        async with asyncio.timeout(10):
            async with gateway.body_room.held(200_000):
                asking = asyncio.create_task(served(app, gateway)(scope, unused, unused))
                await asyncio.sleep(0)
                await asyncio.sleep(0.05)
            await asking

    asyncio.run(ask())
    assert left_s[0] < 600 - 0.04


def most_read_at_a_time(gateway: Gateway, declared: int | None, num_sent: int) -> int:
    """Of five requests, each of which ends once no other begins to be read."""
    reading: list[None] = []
    counts: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"x" * num_sent, "more_body": False}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        reading.append(None)
        for _ in range(20):
            await asyncio.sleep(0)
        counts.append(len(reading))
        reading.pop()

    async def send(message: Message) -> None:
        pass

    async def all_of_them() -> None:
        scope = {"type": "http", "path": GENERATE, "headers": length_of(declared)}
        asked = served(app, gateway)
        async with asyncio.timeout(10):
            await asyncio.gather(*(asked(scope, receive, send) for _ in range(5)))

    with pytest.MonkeyPatch.context() as patch:  # which the requests undo in any order
        patch.setattr("ray.serve.context._INTERNAL_REPLICA_CONTEXT", None)
        asyncio.run(all_of_them())
    assert len(counts) == 5
    return max(counts)
