"""Headers that Ray Serve would obey, or fail at, before a gateway sees the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from ray.serve._private import http_util
from ray.serve._private.constants import SERVE_MULTIPLEXED_MODEL_ID
from ray.serve._private.proxy import HTTPProxy
from ray.serve._private.proxy_request_response import ASGIProxyRequest
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


ECHO = Starlette(routes=[Route("/", echo)])


async def answer(headers: dict[bytes, bytes], behind: Any = ECHO) -> httpx.Response:
    """Of an application behind the middlewares that the variable names, and behind Ray Serve's."""
    (path,) = PROXY_VARIABLES.values()
    module, name = path.split(":")
    middlewares = getattr(import_module(module), name)()
    app = http_util._apply_middlewares(behind, middlewares)
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


class Proxy(HTTPProxy):
    """Ray Serve's proxy up to where it has read the headers of a request."""

    def __init__(self) -> None:
        pass

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = ASGIProxyRequest(scope, receive, send)
        handle: Any = Handle()
        handle, _ = self.setup_request_context_and_handle("app", handle, "/", request, "id")
        await JSONResponse(handle.chosen)(scope, receive, send)


class Handle:
    """Remembers what a call is to be routed by."""

    def __init__(self, chosen: Mapping[str, str] = MappingProxyType({})) -> None:
        self.chosen = dict(chosen)

    def options(self, **options: str) -> Handle:
        return Handle({**self.chosen, **options})


@pytest.mark.parametrize("separator", ["_", "-"])
@pytest.mark.parametrize("letters", [str.lower, str.upper, str.title])
def test_nobody_names_a_model_that_ray_serve_would_remember(
    letters: Callable[[str], str], separator: str
) -> None:
    """However it is spelled; of each id that it is given, Ray Serve's router keeps something."""
    name = letters(SERVE_MULTIPLEXED_MODEL_ID).replace("_", separator)
    sent = {name.encode(): b"one of many", b"x-session-id": b"mine"}
    found = asyncio.run(answer(sent, Proxy())).json()
    assert found == {"session_id": "mine"}


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
