"""What the framework refuses is answered in the shape of the OpenAI API."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError
from starlette.testclient import TestClient

from deployments.gateway import Gateway
from deployments.http.body_limit import BodyLimit
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import GatewayConfig, default_config


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models/a/b", "GET, HEAD"),
        ("/v1/speculation/databases", "GET, HEAD"),
        ("/v1/speculation/databases/a", "DELETE, GET, HEAD"),
        ("/v1/speculation/databases/a/import", "DELETE, GET, HEAD, POST"),
        ("/openapi.json", "GET, HEAD"),
        ("/docs/files/swagger-ui.css", "GET, HEAD"),
        ("/page/main.js", "GET, HEAD"),
    ],
)
def test_all_methods_of_a_path_are_allowed(path: str, allowed: str) -> None:
    """Not those of the first route alone; and each of them is."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.put(path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed
        assert answer.json()["error"]["code"] == "invalid_route"
        *most, last = allowed.split(", ")
        wanted = f"{', '.join(most)} or {last}" if most else last
        assert answer.json()["error"]["message"] == f"PUT is not allowed here: use {wanted}"


def test_a_wrong_method_is_told_to_clients_of_each_api() -> None:
    """In its own shape."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        told = client.get("/v1/messages").json()
    assert told["type"] == "error"
    assert told["error"]["message"] == "GET is not allowed here: use POST"


def test_unknown_routes() -> None:
    """Are no models."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "invalid_route")
    assert "allow" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/models/a/b", "/v1/models/a/b"),
        ("POST", "/v1/tokenize", "/tokenize"),
        ("GET", "/chat/completions", None),
        ("POST", "/v1/embeddings", None),
        ("GET", "/v1", None),
    ],
)
def test_unknown_routes_name_the_one_that_is_meant(
    method: str, path: str, meant: str | None
) -> None:
    """A base URL without ``/v1``, or with two, is what newcomers begin with."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.request(method, path)
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    hint = "" if meant is None else f"; did you mean {meant}?"
    assert message == f"there is no route {method} {path}{hint}"


def test_messages_about_unknown_routes_are_bounded() -> None:
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.get(f"/v1/{'é' * 5000}")
    assert len(answer.json()["error"]["message"]) < 200


@pytest.mark.parametrize(
    ("method", "path", "location"),
    [
        ("POST", "/v1/chat/completions/?a=b%20c", "/v1/chat/completions?a=b%20c"),
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "//v1//models", "/v1/models"),
        ("GET", "/v1/models/hdserve-tiny/", "/v1/models/hdserve-tiny"),
        ("HEAD", "/v1//models//hdserve-tiny", "/v1/models/hdserve-tiny"),
        ("HEAD", "/health/", "/health"),
        ("GET", "//", "/"),
        ("GET", "//elsewhere.example/health/", None),
        ("GET", "/v1/chat/completions/", None),
    ],
)
def test_slashes_too_many_lead_to_the_route(method: str, path: str, location: str | None) -> None:
    """On the same server by the same scheme: in front of it a proxy may speak TLS, and a client
    would send what is in the request in the clear."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.request(method, f"http://hdserve{path}", follow_redirects=False)
    assert answer.headers.get("location") == location
    assert answer.status_code == (404 if location is None else 307)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health/", 307), ("//metrics", 307), ("/v1/models/", 401), ("/nowhere/", 401)],
)
def test_what_leads_to_an_open_route_needs_no_key(path: str, status: int) -> None:
    """As the route itself needs none."""
    access = Access(keys=(ApiKey(b"digest", "default"),))
    with TestClient(build_api(Gateway(default_config(), {}, access))) as client:
        answer = client.get(f"http://hdserve{path}", follow_redirects=False)
    assert answer.status_code == status


@pytest.mark.parametrize("path", ["/", "/health", "/version", "/docs", "/page/main.js"])
def test_head_is_get_without_the_body(path: str) -> None:
    """As monitors ask whether a server is there."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        whole, answer = client.get(path), client.head(path)
        refused = client.head("/v1/chat/completions")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers == whole.headers
    assert answer.headers["content-length"] == str(len(whole.content))
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("method", "path", "status", "route"),
    [
        ("POST", "/v1/chat/completions", 401, "/v1/chat/completions"),
        ("GET", "/v1/models/a/b", 401, "/v1/models/{name:path}"),
        ("GET", "/v1/chat/completions", 401, "unknown"),
        ("POST", "/v1/nothing", 401, "unknown"),
        ("POST", "/tokenize", 413, "/tokenize"),
        ("GET", "/health", 413, "unknown"),
    ],
)
def test_what_is_refused_before_its_route_is_found_is_counted_there(
    method: str, path: str, status: int, route: str
) -> None:
    """If that is among the answers of the route."""
    access = Access(keys=(ApiKey(b"digest", "default"),)) if status == 401 else Access()
    gateway = Gateway(default_config(), {}, access)
    with TestClient(build_api(gateway)) as client:
        before = {item.labels for item in gateway.http_metrics.samples()}
        answer = client.request(method, path, headers={"content-length": "999999999"})
    assert answer.status_code == status
    counts = {item.labels: item.value for item in gateway.http_metrics.samples()}
    assert counts[route, str(status)] == 1
    assert (route, str(status)) in before


@pytest.mark.parametrize("cancellation", [None, TaskCancelledError, asyncio.CancelledError])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_who_hangs_up_in_the_middle_of_a_request_is_no_fault_of_ours(
    path: str, cancellation: type[BaseException] | None
) -> None:
    """Counted, but neither as an internal error nor with a traceback in the log; Ray's proxy may
    have cancelled what reads for it by then, or the request as a whole."""
    gateway = Gateway(default_config(), {})
    messages = iter(
        [
            {"type": "http.request", "body": b'{"model": ', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-length", b"1000")],
    }

    async def receive() -> Any:
        message = next(messages)
        if cancellation is not None and message["type"] == "http.disconnect":
            raise cancellation
        return message

    async def send(_: Any) -> None:
        pass

    is_ended = cancellation is asyncio.CancelledError
    with pytest.raises(asyncio.CancelledError) if is_ended else nullcontext():
        asyncio.run(build_api(gateway)(scope, receive, send))
    counts = {
        item.labels: item.value
        for item in gateway.http_metrics.samples()
        if item.name == "hdserve_http_requests" and item.value
    }
    assert counts == {(path, "499"): 1}


def test_who_hangs_up_in_a_stream_is_told_of_as_any_server_does() -> None:
    """Ray's proxy says it by an error, for which it would be too late."""

    async def receive() -> Any:
        raise TaskCancelledError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(await receive())

    async def send(_message: Any) -> None:
        raise AssertionError

    found: list[Any] = []
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    asyncio.run(BodyLimit(app, GatewayConfig())(scope, receive, send))
    assert found == [{"type": "http.disconnect"}]
