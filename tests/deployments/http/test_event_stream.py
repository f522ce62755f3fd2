"""A stream of which nothing comes for a while shows that it is alive, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from ray import serve
from starlette.types import Message, Receive, Scope, Send

from deployments.gateway import Gateway
from deployments.generation import Delta, GenerationRequest, ModelInfo, Records, Summary
from deployments.http.keep_alive import COMMENT, PING, SIGNS
from deployments.http.routes import build_api
from deployments.replica.heartbeat import AnswersCalls
from deployments.request_faults import RequestFault
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from hdserve.core import DraftCounts
from hdserve.errors import EngineStopped, InvalidRequest, PromptTooLong, RequestError
from tests.deployments.http.server import Counted, served
from tests.waiting import WAIT_S, eventually

INTERVAL_S = 0.05
NEVER_S = 3600.0
HI: Any = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [HI], "max_tokens": 9},
}
DEPENDENT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "/v1/responses": {"reasoning": {"effort": "low"}},
    "/v1/messages": {"thinking": {"type": "adaptive"}},
}
"""Fields of which a replica has to say what they do."""

REASON = "the prompt is wrong"


class Held:
    """Answers two tokens; before the one at ``place`` it is held up.

    Args:
        released: a file that ends that by being there.
        is_refusing: whether the request turns out to be wrong there.
        kind: of the error.
    """

    def __init__(
        self,
        released: Path,
        place: int = 0,
        *,
        is_refusing: bool = False,
        kind: type[RequestError] = InvalidRequest,
    ) -> None:
        self._released = released
        self._place = place
        self._is_refusing = is_refusing
        self._kind = kind

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records | RequestFault]:
        for index, (text, reason) in enumerate((("a", None), ("b", "stop"))):
            if index == self._place:
                await self._held_up()
                if self._is_refusing:
                    yield RequestFault(self._kind(REASON, "prompt"))
                    return
            yield (Delta(0, 0, text, (1,), (0,), None, reason),)
        yield (Summary(1, 2, DraftCounts(), "r"),)

    async def _held_up(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self._released.exists():
                await asyncio.sleep(0.01)


class Failing:
    """Answers a token, and then fails."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        yield (Delta(0, 0, "a", (1,), (0,), None, None),)
        raise EngineStopped(REASON)


class Wrong:
    """Answers a token, and then what no builder expects."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        yield (Delta(0, 0, "a", (1,), (0,), None, None),)
        unknown: Any = object()
        yield (unknown,)


class Loading(AnswersCalls, Held):
    """Is held up before it can say what it is, as a model that has no replica yet."""

    async def describe(self) -> ModelInfo:
        await self._held_up()
        if self._is_refusing:
            raise EngineStopped(REASON)
        known = ("m", 1024, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")
        return ModelInfo(*known, tool_parser="hermes")


class Released:
    """An application whose model is released by its second sign of life in a row.

    Args:
        after: what has been sent before these signs.

    Attributes:
        bodies: what was sent.
    """

    def __init__(self, app: Any, released: Path, after: bytes) -> None:
        self._app = app
        self._released = released
        self._after = after
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                self.bodies.append(message["body"])
                are_signs = len(self.bodies) > 1 and all(body in SIGNS for body in self.bodies[-2:])
                if are_signs and self._after in b"".join(self.bodies):
                    self._released.touch()

        await self._app(scope, receive, noted)


def gateway_of(model: serve.Application, interval_s: float | None = INTERVAL_S) -> Gateway:
    handle: Any = serve.run(model, name="model", _local_testing_mode=True)
    options = GatewayConfig(stream_keep_alive_s=interval_s)
    models = (ModelConfig(name="m", model="m"),)
    return Gateway(ServeConfig(models=models, gateway=options), {"m": handle})


@contextmanager
def held(
    directory: Path, place: int = 0, *, is_refusing: bool = False, kind: type[Held] = Held
) -> Iterator[tuple[str, Released]]:
    """Where a model is asked that is held up until it was silent for a while."""
    released = directory / "released"
    model = serve.deployment(kind).bind(released, place, is_refusing=is_refusing)
    app = Released(build_api(gateway_of(model)), released, b'"a"' if place else b"")
    with served(app) as (host, port):
        yield f"http://{host}:{port}", app


def stream_of(url: str, path: str, **fields: Any) -> httpx.Response:
    body = {"model": "m", "stream": True, **BODIES[path], **fields}
    return httpx.post(f"{url}{path}", json=body, timeout=WAIT_S)


def sign_of(path: str) -> bytes:
    return PING if path == "/v1/messages" else COMMENT


@pytest.mark.parametrize("path", BODIES)
def test_signs_come_before_the_first_event(tmp_path: Path, path: str) -> None:
    """In the form of the API, behind the status."""
    with held(tmp_path) as (url, _):
        answer = stream_of(url, path)
    assert (answer.status_code, answer.headers["x-accel-buffering"]) == (200, "no")
    sign = sign_of(path)
    signs, events = answer.content[: 2 * len(sign)], answer.content[2 * len(sign) :]
    assert signs == 2 * sign
    first = next(event for event in events.split(sign) if event)
    assert first.startswith((b"data: {", b"event: "))
    assert b'"a"' in events
    assert b'"b"' in events


@pytest.mark.parametrize("path", BODIES)
def test_signs_come_between_tokens(tmp_path: Path, path: str) -> None:
    with held(tmp_path, 1) as (url, _):
        content = stream_of(url, path).content
    _, first, rest = content.partition(b'"a"')
    between, second, _ = rest.partition(b'"b"')
    assert first
    assert 2 * sign_of(path) in between
    assert second


@pytest.mark.parametrize("path", DEPENDENT)
def test_signs_come_while_nothing_is_known_of_the_model(tmp_path: Path, path: str) -> None:
    """Though the answer depends on it."""
    with held(tmp_path, kind=Loading) as (url, _):
        answer = stream_of(url, path, **DEPENDENT[path])
    sign = sign_of(path)
    assert answer.status_code == 200
    assert answer.content.startswith(2 * sign)
    assert b'"a"' in answer.content
    assert b'"b"' in answer.content


@pytest.mark.parametrize("path", DEPENDENT)
def test_a_model_of_which_nothing_becomes_known(tmp_path: Path, path: str) -> None:
    """Behind signs, an event says so; before any it has its status."""
    with held(tmp_path, is_refusing=True, kind=Loading) as (url, app):
        answer = stream_of(url, path, **DEPENDENT[path])
        assert app.bodies[:2] == 2 * [sign_of(path)]
    assert answer.status_code == 200
    assert REASON in answer.text
    model = serve.deployment(Loading).bind(tmp_path / "released", is_refusing=True)
    with served(build_api(gateway_of(model, NEVER_S))) as (host, port):
        answer = stream_of(f"http://{host}:{port}", path, **DEPENDENT[path])
    assert answer.status_code == 503
    assert REASON in answer.json()["error"]["message"]


def test_the_forms() -> None:
    """Each ends with the empty line behind which an event begins."""
    assert (COMMENT, PING) == (b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n')


def openai_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def chat(url: str) -> str:
    with openai_at(url) as client:
        chunks = client.chat.completions.create(model="m", messages=[HI], stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def completion(url: str) -> str:
    with openai_at(url) as client:
        chunks = client.completions.create(model="m", prompt="hi", stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)


def response(url: str) -> str:
    with openai_at(url) as client, client.responses.stream(model="m", input="hi") as events:
        for event in events:
            if event.type == "error":
                raise openai.APIError(event.message, httpx.Request("POST", url), body=None)
        return events.get_final_response().output_text


def message(url: str) -> str:
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S) as client,
        client.messages.stream(model="m", messages=[HI], max_tokens=9) as events,
    ):
        return events.get_final_text()


@pytest.mark.parametrize("ask", [chat, completion, response, message])
def test_clients_read_through_signs(tmp_path: Path, ask: Callable[[str], str]) -> None:
    with held(tmp_path) as (url, app):
        assert ask(url) == "ab"
    assert app.bodies[:2] in ([COMMENT, COMMENT], [PING, PING])


@pytest.mark.parametrize("ask", [chat, completion, response, message])
def test_clients_are_told_of_a_refusal_behind_signs(
    tmp_path: Path, ask: Callable[[str], str]
) -> None:
    """By an event, as the status has been sent."""
    with (
        held(tmp_path, is_refusing=True) as (url, app),
        pytest.raises((openai.APIError, anthropic.APIError), match=REASON),
    ):
        ask(url)
    assert app.bodies[:2] in ([COMMENT, COMMENT], [PING, PING])


@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_before_any_sign_has_its_status(tmp_path: Path, path: str) -> None:
    tmp_path.joinpath("released").touch()
    model = serve.deployment(Held).bind(tmp_path / "released", is_refusing=True)
    app = build_api(gateway_of(model, NEVER_S))
    with served(app) as (host, port):
        answer = stream_of(f"http://{host}:{port}", path)
    assert answer.status_code == 400
    assert REASON in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_that_the_context_is_full_is_a_status_or_an_event(tmp_path: Path, path: str) -> None:
    """As each API has it."""
    tmp_path.joinpath("released").touch()
    model = serve.deployment(Held).bind(tmp_path / "released", is_refusing=True, kind=PromptTooLong)
    with served(build_api(gateway_of(model, NEVER_S))) as (host, port):
        answer = stream_of(f"http://{host}:{port}", path)
    assert REASON in answer.text
    if path != "/v1/responses":
        assert answer.status_code == 400
        return
    assert answer.status_code == 200
    *_, last = filter(None, answer.text.splitlines())
    failed = json.loads(last.removeprefix("data: "))["response"]
    assert failed["error"] == {"code": "context_length_exceeded", "message": REASON}


def stream_errors(gateway: Gateway) -> dict[tuple[str, ...], Any]:
    """By route that generates."""
    samples = gateway.http_metrics.samples()
    counts = {item.labels: item.value for item in samples if item.name == "hdserve_stream_errors"}
    return {(path,): counts[path,] for path in BODIES}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("kind", "reason"), [(Failing, REASON), (Wrong, "an internal error occurred")]
)
def test_streams_that_fail_are_counted(path: str, kind: type[Any], reason: str) -> None:
    """Their status says nothing of it."""
    gateway = gateway_of(serve.deployment(kind).bind())
    app = build_api(gateway)
    assert stream_errors(gateway) == {(each,): 0 for each in BODIES}
    with served(app) as (host, port):
        answer = stream_of(f"http://{host}:{port}", path)
    assert answer.status_code == 200
    assert reason in answer.text
    assert stream_errors(gateway) == {(each,): int(each == path) for each in BODIES}


@pytest.mark.parametrize("path", BODIES)
def test_what_clients_ask_wrongly_is_no_failure(tmp_path: Path, path: str) -> None:
    """Though it turns out behind the status."""
    tmp_path.joinpath("released").touch()
    model = serve.deployment(Held).bind(tmp_path / "released", 1, is_refusing=True)
    gateway = gateway_of(model)
    with served(build_api(gateway)) as (host, port):
        answer = stream_of(f"http://{host}:{port}", path)
    assert answer.status_code == 200
    assert REASON in answer.text
    assert not any(stream_errors(gateway).values())


@pytest.mark.parametrize(("interval_s", "status"), [(INTERVAL_S, "200"), (NEVER_S, "499")])
@pytest.mark.parametrize("path", BODIES)
def test_who_hangs_up_in_a_silence_is_noticed(
    tmp_path: Path, path: str, interval_s: float, status: str
) -> None:
    """Behind signs and before any; the answer ends, and is counted once."""
    gateway = gateway_of(serve.deployment(Held).bind(tmp_path / "released"), interval_s)
    app = Counted(build_api(gateway))
    with served(app) as address:
        connection = HTTPConnection(*address, timeout=WAIT_S)
        body = json.dumps({"model": "m", "stream": True, **BODIES[path]})
        connection.request("POST", path, body)
        eventually(lambda: asyncio.run(gateway.num_answering()) == 1)
        if status == "200":
            with connection.getresponse() as answer:
                assert answer.read(len(sign_of(path))) == sign_of(path)
        connection.close()
        eventually(lambda: app.num_open == 0)
        assert asyncio.run(gateway.num_answering()) == 0
    tmp_path.joinpath("released").touch()
    counts = {
        item.labels: item.value
        for item in gateway.http_metrics.samples()
        if item.name == "hdserve_http_requests" and item.value
    }
    assert counts == {(path, status): 1}


def test_error_events_have_the_form_of_their_api(tmp_path: Path) -> None:
    """A response begins first."""
    kinds = {}
    for number, path in enumerate(BODIES):
        directory = tmp_path / str(number)
        directory.mkdir()
        with held(directory, is_refusing=True) as (url, _):
            lines = stream_of(url, path).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        events = [json.loads(line) for line in data]
        kinds[path] = [item.get("type") for item in events if item.get("type") != "ping"]
        is_openai = path in ("/v1/chat/completions", "/v1/completions")
        assert (lines[-2] == "data: [DONE]") == is_openai
        assert REASON in json.dumps(events[-1])
    assert kinds == {
        "/v1/chat/completions": [None],
        "/v1/completions": [None],
        "/v1/responses": [
            "response.created",
            "response.in_progress",
            "error",
            "response.failed",
        ],
        "/v1/messages": ["error"],
    }
