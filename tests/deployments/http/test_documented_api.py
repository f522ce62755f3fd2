"""What ``/openapi.json`` says of keys and statuses is so."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey, read_access
from hdserve.config import AccessConfig, default_config

ADMIN_KEY = "the-key-of-the-administrator"
OPEN = read_access(AccessConfig(admin_key=SecretStr(ADMIN_KEY)))
CLOSED = Access(keys=(ApiKey(b"digest", "default"),), admin_digest=OPEN.admin_digest)


def operations(access: Access) -> tuple[Any, dict[tuple[str, str], dict[str, Any]]]:
    """The application, and what it documents by method and path."""
    api = build_api(Gateway(default_config(), {}, access))
    paths = api.openapi()["paths"]
    assert paths is api.openapi()["paths"]
    return api, {
        (method, path): operation
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


@pytest.mark.parametrize("access", [OPEN, CLOSED], ids=["open", "closed"])
def test_a_key_is_needed_where_it_is_documented(access: Access) -> None:
    """Asked without one, an operation is refused exactly where the schema says so."""
    api, documented = operations(access)
    assert api.openapi()["components"]["securitySchemes"]["api_key"]["scheme"] == "bearer"

    async def ask(method: str, path: str) -> int:
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
            return (
                await client.request(method, path.replace("{", "").replace("}", ""))
            ).status_code

    for (method, path), operation in documented.items():
        if path == "/metrics":  # asks other processes
            assert "security" not in operation
            continue
        is_needed = operation.get("security", [{}]) == [{"api_key": []}]
        status = asyncio.run(ask(method, path))
        assert (status in (401, 403)) == is_needed, (method, path, status)
        assert not is_needed or str(status) in operation["responses"]


def test_statuses_are_those_that_are_sent() -> None:
    """FastAPI's own answer to wrong parameters is not; bodies may be too large or slow."""
    api, documented = operations(OPEN)
    assert "ValidationError" not in str(api.openapi())
    for (method, path), operation in documented.items():
        assert "422" not in operation["responses"]
        assert ("413" in operation["responses"]) == (method == "post"), path
        assert ("408" in operation["responses"]) == (method == "post"), path
        assert ("requestBody" in operation) == (method == "post"), path


def test_limits_are_documented_in_words_of_json_schema() -> None:
    _, documented = operations(OPEN)
    body = documented["post", "/v1/completions"]["requestBody"]
    num_choices = body["content"]["application/json"]["schema"]["properties"]["n"]["anyOf"][0]
    assert num_choices == {"type": "integer", "minimum": 1, "maximum": 64}
    assert not keys_of(documented) & {"ge", "gt", "le", "lt"}


def keys_of(part: Any) -> set[str]:
    """Those of all objects in it."""
    if isinstance(part, list):
        return set().union(*map(keys_of, part))
    return set(part).union(*map(keys_of, part.values())) if isinstance(part, dict) else set()


def test_what_can_be_streamed_says_so() -> None:
    """Beside the answer in one object."""
    _, documented = operations(OPEN)
    streamed = {
        path: set(operation["responses"]["200"]["content"])
        for (_, path), operation in documented.items()
        if "text/event-stream" in operation["responses"]["200"].get("content", {})
    }
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
    assert streamed == {path: {"application/json", "text/event-stream"} for path in paths}
