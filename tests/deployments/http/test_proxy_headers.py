"""Headers that Ray Serve would obey, or fail at, before a gateway sees the request."""

from __future__ import annotations

import asyncio
from importlib import import_module

import httpx
import pytest
from ray.serve._private import http_util
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hdserve.config.deployed import PROXY_VARIABLES


async def echo(request: Request) -> JSONResponse:
    """The headers, as Ray Serve reads them."""
    headers = dict(request.scope["headers"])
    http_util.parse_request_timeout_header(headers, None)
    return JSONResponse({name.decode(): value.decode() for name, value in headers.items()})


async def answer(headers: dict[bytes, bytes]) -> httpx.Response:
    """Of an application behind the middlewares that the variable names, and behind Ray Serve's."""
    (path,) = PROXY_VARIABLES.values()
    module, name = path.split(":")
    middlewares = getattr(import_module(module), name)()
    app = http_util._apply_middlewares(Starlette(routes=[Route("/", echo)]), middlewares)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.get("/", headers=headers)


def ask(headers: dict[bytes, bytes]) -> dict[str, str]:
    """What the application sees."""
    found: dict[str, str] = asyncio.run(answer(headers)).json()
    return found


def test_what_cuts_an_answer_off_or_has_it_go_on_is_dropped() -> None:
    sent = {
        b"x-request-timeout-seconds": b"0.01",
        b"X-Request-Disconnect-Disabled": b"?1",
        b"x-session-id": b"mine",
    }
    found = ask(sent)
    assert found["x-session-id"] == "mine"
    assert not found.keys() & {"x-request-timeout-seconds", "x-request-disconnect-disabled"}


@pytest.mark.parametrize(
    ("sent", "seen"), [(b"caf\xe9", r"caf\xe9"), ("café".encode(), "café"), (b"plain", "plain")]
)
def test_bytes_that_are_no_utf_8_are_escaped(sent: bytes, seen: str) -> None:
    assert ask({b"x-request-id": sent})["x-request-id"] == seen


def test_an_empty_id_is_none() -> None:
    """One is made up, of which the answer tells, too."""
    found = asyncio.run(answer({b"x-request-id": b""}))
    made_up = found.json()["x-request-id"]
    assert made_up
    assert found.headers.get_list("x-request-id") == [made_up]
