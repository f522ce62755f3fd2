"""What the framework refuses is answered in the shape of the OpenAI API."""

from __future__ import annotations

import pytest
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
