"""The list of models, as the real clients of both APIs read it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256

import anthropic
import openai
import pytest
from starlette.testclient import TestClient

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from hdserve.access import Access, ApiKey
from hdserve.config import ServeConfig

KEY = "a-key-that-is-long-enough"
MODEL = {"name": "m", "model": "m", "aliases": ["a", "b"], "autoscaling": {"min_replicas": 0}}
CONFIG = ServeConfig.model_validate({"models": [MODEL]})


@pytest.fixture
def served() -> Iterator[TestClient]:
    """A gateway of which no replica is asked."""
    access = Access((ApiKey(sha256(KEY.encode()).digest(), "n"),))
    with TestClient(build_api(Gateway(CONFIG, {}, access)), base_url="http://hdserve") as client:
        yield client


def claude(served: TestClient, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url="http://hdserve", api_key=key, max_retries=0, http_client=served
    )


def test_anthropics_client_lists_models(served: TestClient) -> None:
    """On one page; each has a name to show and a time."""
    page = claude(served).models.list(limit=2)
    assert (page.has_more, page.first_id, page.last_id) == (False, "m", "b")
    assert [model.id for model in page] == [model.display_name for model in page] == ["m", "a", "b"]
    model = page.data[0]
    assert model.type == "model"
    assert abs((datetime.now(UTC) - model.created_at).total_seconds()) < 600


def test_openais_client_lists_models(served: TestClient) -> None:
    """As ever: what is there for the other one is beside what it reads."""
    client = openai.OpenAI(
        base_url="http://hdserve/v1", api_key=KEY, max_retries=0, http_client=served
    )
    found = client.models.list()
    assert [(model.id, model.object, model.owned_by) for model in found] == [
        (name, "model", "hdserve") for name in ("m", "a", "b")
    ]
    assert all(isinstance(model.created, int) for model in found)
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"


def test_errors_are_those_of_the_client_that_asks(served: TestClient) -> None:
    """Which every client of Anthropic's API says."""
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        claude(served, "wrong").models.list()
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude(served).models.retrieve("no-such-model", extra_headers={"x-request-id": "id-7"})
    assert missing.value.request_id == "id-7"
    for caught, kind in ((unknown, "authentication_error"), (missing, "not_found_error")):
        body = caught.value.body
        assert isinstance(body, dict)
        assert (body["type"], body["error"]["type"]) == ("error", kind)
    answer = served.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert answer.json()["error"]["code"] == "invalid_api_key"
    answer = served.get("/v1/modelsx", headers={"x-api-key": KEY, "anthropic-version": "1"})
    assert answer.json()["error"]["code"] == "invalid_route"
