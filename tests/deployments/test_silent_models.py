"""What generates nothing ends, too, while a model has no replica that answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from ray import serve

from deployments.gateway import Gateway
from deployments.http.routes import build_api
from deployments.replica.heartbeat import AnswersCalls
from hdserve.access import read_access
from hdserve.config import AccessConfig, GatewayConfig, ModelConfig, ServeConfig

KEY = "the-key-of-the-administrator"
ADMIN = {"authorization": f"Bearer {KEY}"}
MODELS = "/v1/models/m"
DATABASES = "/v1/speculation/databases"
TEXT = ("POST", "/tokenize", {"model": "m", "prompt": "a"})
CHAT = ("POST", "/tokenize", {"model": "m", "messages": [{"role": "user", "content": "a"}]})
TOKENS = ("POST", "/detokenize", {"model": "m", "tokens": [1]})
QUESTIONS: list[tuple[str, str, Any]] = [
    ("GET", MODELS, None),
    ("GET", f"{DATABASES}/m", None),
    ("GET", f"{DATABASES}/m/export", None),
    ("DELETE", f"{DATABASES}/m?namespace=a", None),
]
WAIT_S = 60.0


class Silent(AnswersCalls):
    """Has no answer to anything."""

    async def describe(self) -> None:
        await asyncio.sleep(WAIT_S)

    async def tokenize(self, *_: Any) -> None:
        await asyncio.sleep(WAIT_S)

    tokenize_chat = detokenize = tokenize


def gateway(request_timeout_s: float | None, describe_timeout_s: float) -> Gateway:
    application = serve.deployment(Silent).bind()
    handle: Any = serve.run(application, name="silent", _local_testing_mode=True)
    config = ServeConfig(
        models=(ModelConfig(name="m", model="m"),),
        gateway=GatewayConfig(request_timeout_s=request_timeout_s),
    )
    access = read_access(AccessConfig(admin_key=SecretStr(KEY)))
    return Gateway(config, {"m": handle}, access, describe_timeout_s)


def ask(asked: Gateway, method: str, path: str, body: Any) -> httpx.Response:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(build_api(asked))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://hdserve", headers=ADMIN
        ) as client:
            async with asyncio.timeout(WAIT_S / 2):
                return await client.request(method, path, json=body)

    return asyncio.run(answer())


def check(asked: Gateway, answer: httpx.Response, path: str, status: int, code: str) -> None:
    """The error, which the schema has."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    documented = build_api(asked).openapi()["paths"]
    method = answer.request.method.lower()
    route = path.partition("?")[0].replace("/models/m", "/models/{name}")
    route = route.replace("/databases/m", "/databases/{model}")
    assert str(status) in documented[route][method]["responses"]


@pytest.mark.parametrize(("method", "path", "body"), QUESTIONS)
def test_a_question_of_what_a_model_is(method: str, path: str, body: Any) -> None:
    """It is given up before long, whatever answers may take."""
    asked = gateway(None, 0.05)
    answer = ask(asked, method, path, body)
    check(asked, answer, path, 503, "engine_stopped")
    assert "0.05 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "body"), [TEXT, CHAT, TOKENS, QUESTIONS[0]])
def test_an_answer_that_takes_too_long(method: str, path: str, body: Any) -> None:
    """As one that is generated."""
    asked = gateway(0.05, WAIT_S)
    answer = ask(asked, method, path, body)
    check(asked, answer, path, 504, "request_timeout")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", f"{DATABASES}/m/statistics"])
def test_a_body_that_does_not_come(path: str) -> None:
    """Is not waited for any longer."""
    asked = gateway(0.05, WAIT_S)
    sent: list[Any] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-length", b"1000"), (b"authorization", f"Bearer {KEY}".encode())],
    }
    messages = [{"type": "http.request", "body": b'{"model": ', "more_body": True}]

    async def receive() -> Any:
        if not messages:
            await asyncio.sleep(WAIT_S)
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        async with asyncio.timeout(WAIT_S / 2):
            await build_api(asked)(scope, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 504
    route = path.replace("/m/", "/{model}/")
    assert "504" in build_api(asked).openapi()["paths"][route]["post"]["responses"]


def test_the_list_of_databases() -> None:
    """A model that does not answer is named with that, and hides no other."""
    answer = ask(gateway(None, 0.05), "GET", DATABASES, None)
    assert answer.status_code == 200
    (entry,) = answer.json()["data"]
    assert (entry["id"], entry["object"]) == ("m", "speculation.database")
    assert entry["error"]["code"] == "engine_stopped"
