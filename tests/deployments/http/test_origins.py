"""Web pages of other origins may ask where the configuration names them, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig

ORIGIN, OTHER = "https://chat.example.com", "https://elsewhere.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}
ALLOW = "access-control-allow-origin"


@contextmanager
def client_of(*origins: str) -> Iterator[TestClient]:
    """Of a gateway that wants a key."""
    models = (ModelConfig(name="m", model="m"),)
    config = ServeConfig(models=models, gateway=GatewayConfig(allowed_origins=origins))
    access = Access(keys=(ApiKey(b"digest", "default"),))
    with TestClient(build_api(Gateway(config, {}, access))) as client:
        yield client


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((ORIGIN,), ORIGIN, ORIGIN),
        ((OTHER, ORIGIN), ORIGIN, ORIGIN),
        (("*",), ORIGIN, "*"),
        (("https://A.Example:443",), "https://a.example", "https://a.example"),
        (("http://A.Example:80",), "http://a.example", "http://a.example"),
        (("http://a.example:443",), "http://a.example:443", "http://a.example:443"),
        (("app://Own",), "app://Own", "app://Own"),
        ((ORIGIN,), OTHER, None),
        ((), ORIGIN, None),
    ],
)
def test_pages_may_ask_where_their_origin_is_named(
    origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    """A browser asks without the key first whether it may send one; errors can be read, too."""
    with client_of(*origins) as client:
        preflight = client.options("/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
        health = client.get("/health", headers={"origin": origin})
        refused = client.post("/v1/chat/completions", headers={"origin": origin})
    assert (preflight.status_code == 200) == (allowed is not None)
    assert [answer.headers.get(ALLOW) for answer in (preflight, health, refused)] == [allowed] * 3
    assert (health.status_code, refused.status_code) == (200, 401)
    if allowed is None:
        return
    for name in PREFLIGHT["access-control-request-headers"].split(","):
        assert name in preflight.headers["access-control-allow-headers"]
    for answer in (preflight, health):
        assert "access-control-allow-credentials" not in answer.headers
    shown = health.headers["access-control-expose-headers"].split(", ")
    for name in (
        "request-id",
        "x-request-id",
        "x-hdserve-ignored",
        "retry-after",
        "x-should-retry",
    ):
        assert name in shown


def test_others_than_pages_notice_nothing() -> None:
    """Nor does the page of the server itself, whose requests name no other origin."""
    with client_of(ORIGIN) as client:
        answer = client.get("/health")
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
