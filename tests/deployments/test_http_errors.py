"""What the framework refuses is answered in the shape of the OpenAI API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError
from starlette.testclient import TestClient

from deployments.gateway import Gateway
from deployments.routes import build_api
from hdserve.config import default_config


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models/a/b", "GET"),
        ("/v1/speculation/databases", "GET"),
        ("/v1/speculation/databases/a", "DELETE, GET"),
        ("/v1/speculation/databases/a/import", "DELETE, GET, POST"),
        ("/openapi.json", "GET, HEAD"),
    ],
)
def test_all_methods_of_a_path_are_allowed(path: str, allowed: str) -> None:
    """Not those of the first route alone; and each of them is."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.put(path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed
        assert answer.json()["error"]["code"] == "invalid_route"


def test_unknown_routes() -> None:
    """Are no models."""
    with TestClient(build_api(Gateway(default_config(), {}))) as client:
        answer = client.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "invalid_route")
    assert "allow" not in answer.headers


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_who_hangs_up_in_the_middle_of_a_request_is_no_fault_of_ours(
    path: str, is_cancelled: bool
) -> None:
    """Counted, but neither as an internal error nor with a traceback in the log; Ray's proxy may
    have cancelled what reads for it by then."""
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
        if is_cancelled and message["type"] == "http.disconnect":
            raise TaskCancelledError
        return message

    async def send(_: Any) -> None:
        pass

    asyncio.run(build_api(gateway)(scope, receive, send))
    counts = {
        item.labels: item.value
        for item in gateway.http_metrics.samples()
        if item.name == "hdserve_http_requests" and item.value
    }
    assert counts == {(path, "499"): 1}
