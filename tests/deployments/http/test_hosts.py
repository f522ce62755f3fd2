"""Web pages cannot read answers by giving their own names the address of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig

NAME, OTHER = "Chat.example.com", "elsewhere.example"
ORIGIN = "https://page.example"


def api_of(names: Sequence[str] | None, access: Access | None = None) -> FastAPI:
    models = (ModelConfig(name="m", model="m"),)
    gateway = GatewayConfig(
        allowed_hosts=None if names is None else tuple(names), allowed_origins=(ORIGIN,)
    )
    return build_api(Gateway(ServeConfig(models=models, gateway=gateway), {}, access))


@contextmanager
def client_of(names: Sequence[str] | None, access: Access | None = None) -> Iterator[TestClient]:
    with TestClient(api_of(names, access)) as client:
        yield client


@pytest.mark.parametrize("port", ["", ":8000"])
@pytest.mark.parametrize(
    ("host", "names", "is_answered"),
    [
        ("127.0.0.1", (), True),
        ("10.0.0.7", (), True),
        ("[::1]", (), True),
        ("localhost", (), True),
        ("LOCALHOST.", (), True),
        ("a.b.localhost", (), True),
        ("chat.example.com", (NAME,), True),
        ("CHAT.example.com.", (OTHER, NAME), True),
        (OTHER, ("*",), True),
        (OTHER, None, True),
        (OTHER, (), False),
        (OTHER, (NAME,), False),
        ("a.chat.example.com", (NAME,), False),
        ("chat.example.com..", (NAME,), False),
        ("notlocalhost", (), False),
        ("localhost.example", (), False),
        ("127.0.0.1.example", (), False),
        ("*", (), False),
    ],
)
def test_names_that_are_answered(
    host: str, names: Sequence[str] | None, is_answered: bool, port: str
) -> None:
    """Addresses and local names always; others where they are listed."""
    with client_of(names) as client:
        answer = client.get("/health", headers={"host": host + port})
    assert answer.status_code == (200 if is_answered else 403)


@pytest.mark.parametrize("access", [Access(), Access(keys=(ApiKey(b"digest", "default"),))])
def test_what_is_answered_to_others(access: Access) -> None:
    """On every route, in the form of its API, and whether or not there are keys."""
    message = (
        f"the server is not to be called '{OTHER}': gateway.allowed_hosts of its configuration "
        "does not list this name"
    )
    with client_of((), access) as client:
        client.headers["host"] = f"{OTHER}:8000"
        for path in ("/", "/metrics", "/v1/models", "/v1/nothing"):
            answer = client.get(path)
            assert answer.status_code == 403
            assert answer.json()["error"]["message"] == message
            assert answer.json()["error"]["code"] == "permission_denied"
        answer = client.post("/v1/messages", json={})
        assert answer.status_code == 403
        assert answer.json()["error"] == {"type": "permission_error", "message": message}
        assert client.head("/health").status_code == 403


def test_names_are_shown_in_part() -> None:
    with client_of(()) as client:
        answer = client.get("/health", headers={"host": "a" * 10_000})
    assert answer.status_code == 403
    assert len(answer.content) < 500


def test_pages_of_allowed_origins_can_read_why() -> None:
    with client_of(()) as client:
        answer = client.get("/health", headers={"host": OTHER, "origin": ORIGIN})
    assert answer.status_code == 403
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_requests_without_a_host_are_answered() -> None:
    """As HAProxy sends them, by HTTP/1.0; browsers send none."""
    request = httpx.Request("GET", "http://localhost/health")
    del request.headers["host"]
    transport = httpx.ASGITransport(api_of(()))
    assert asyncio.run(transport.handle_async_request(request)).status_code == 200
    with client_of(()) as client:
        assert client.get("/health", headers={"host": ""}).status_code == 200
