"""What a client chose is safe to send back, and an answer that breaks off is an error."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import httpx
import openai
import pytest
from fastapi import Request
from ray import serve
from starlette.types import Message

from deployments.anthropic.protocol import MessagesBody
from deployments.gateway import Gateway
from deployments.generation import (
    Alternative,
    Delta,
    GenerationRequest,
    ModelInfo,
    Records,
    Summary,
    TokenInfo,
)
from deployments.http.arrival import Arrival, _header_value
from deployments.http.completion_routes import MAX_ECHO_CHARACTERS
from deployments.http.routes import build_api
from deployments.metrics.samples import HistogramValue
from deployments.openai.completion_builder import CompletionBuilder
from deployments.openai.protocol import ChatBody, CompletionBody
from deployments.openai.request_body import OfferedBody
from deployments.openai.responses_protocol import ResponsesBody
from deployments.replica.heartbeat import AnswersCalls
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig, TelemetryConfig
from hdserve.core import DraftCounts
from hdserve.errors import EngineStopped, HdserveError, InvalidRequest, Unsupported
from hdserve.schema import MAX_UNHELD
from tests.collector import collector

CONFIG = ServeConfig(models=(ModelConfig(name="m", model="m"),))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


class BreakingOff:
    """Ends after ``num_deltas`` deltas, without a summary; with ``error``, if there is one."""

    def __init__(self, num_deltas: int, error: HdserveError | None = None) -> None:
        self._num_deltas = num_deltas
        self._error = error

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        for _ in range(self._num_deltas):
            yield (Delta(0, 0, "text", (1,), (0,), None, None),)
        if self._error is not None:
            raise self._error


class Counting(CompletionBody):
    """Counts how often it is asked what is unmet."""

    num_asked: ClassVar[int] = 0

    @property
    def unmet(self) -> frozenset[str]:
        Counting.num_asked += 1
        return super().unmet


class Measuring:
    """Answers with the size it was told."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        text = f"{request.num_body_bytes} bytes, {dict(request.speculation)}"
        yield Delta(0, 0, text, (1,), (0,), None, "stop"), Summary(1, 1, DraftCounts(), "r")


class Scoring:
    """Answers ``num_tokens`` tokens, with the log probabilities of 20 others."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        token = TokenInfo(b"a", -0.5, (Alternative(b"b", -1.5),) * 20)
        tokens = (token,) * self._num_tokens
        yield Delta(0, 0, "a", (1,), (0,), tokens, "stop"), Summary(1, 1, DraftCounts(), "r")


class Holding:
    """Sends nothing to show for a while, as where a stop string may have begun."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        for text in ("", "", "text"):
            yield (Delta(0, 0, text, (1,), (0,), None, None),)
        yield Delta(0, 0, "", (1,), (0,), None, "stop"), Summary(1, 4, DraftCounts(), "r")


class Stalling:
    """Sends ``num_deltas`` deltas, then nothing any more."""

    def __init__(self, num_deltas: int) -> None:
        self._num_deltas = num_deltas

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        for _ in range(self._num_deltas):
            yield (Delta(0, 0, "text", (1,), (0,), None, None),)
        await asyncio.sleep(3600)


def answer(
    model: serve.Application,
    path: str,
    headers: Mapping[str, str] | Mapping[bytes, bytes] | None = None,
    config: ServeConfig = CONFIG,
    **fields: Any,
) -> httpx.Response:
    handle: Any = serve.run(model, name="model", _local_testing_mode=True)
    transport = httpx.ASGITransport(build_api(Gateway(config, {"m": handle})))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
            body = {"model": "m", **BODIES[path], **fields}
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(post())


def late_answer(
    path: str, num_deltas: int, *, stream: bool, timeout_s: float = 0.2
) -> httpx.Response:
    gateway = GatewayConfig(request_timeout_s=timeout_s)
    config = ServeConfig(models=CONFIG.models, gateway=gateway)
    model = serve.deployment(Stalling).bind(num_deltas)
    return answer(model, path, config=config, stream=stream)


def broken_answer(path: str, num_deltas: int, *, stream: bool) -> httpx.Response:
    return answer(serve.deployment(BreakingOff).bind(num_deltas), path, stream=stream)


@pytest.mark.parametrize("path", BODIES)
def test_a_model_server_knows_the_size_of_a_request(path: str) -> None:
    """Of all of it: whatever is long may take long to make tokens of."""
    labels = {str(number): "u" * 500 for number in range(25)}
    found = answer(serve.deployment(Measuring).bind(), path, metadata=labels)
    assert f"{len(found.request.content)} bytes" in found.text


def test_echoes_are_bounded() -> None:
    """Those of all choices together, streamed or not, as each has all of its own."""
    model = serve.deployment(Measuring).bind()
    for stream in (False, True):
        asked = {"echo": True, "n": 64, "stream": stream}
        fits, found = (
            answer(model, "/v1/completions", prompt="a" * number, **asked)
            for number in (MAX_ECHO_CHARACTERS // 64, MAX_ECHO_CHARACTERS // 64 + 1)
        )
        assert fits.status_code == 200
        assert (found.status_code, found.json()["error"]["param"]) == (400, "echo")


def test_large_whole_answers_are_written_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the loop, on which nothing else would go on."""
    threads = []
    whole = CompletionBuilder.whole

    def noted(self: CompletionBuilder, summary: Summary) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return whole(self, summary)

    monkeypatch.setattr(CompletionBuilder, "whole", noted)
    for num_tokens in (3, 300):
        model = serve.deployment(Scoring).bind(num_tokens)
        found = answer(model, "/v1/chat/completions", logprobs=True, top_logprobs=20)
        assert len(found.json()["choices"][0]["logprobs"]["content"]) == num_tokens
    few, many = threads
    assert many is not few is threading.main_thread()


@pytest.mark.parametrize("path", BODIES)
def test_what_shows_nothing_is_not_sent(path: str) -> None:
    """The first byte, whose time is measured, is one."""
    handle: Any = serve.run(
        serve.deployment(Holding).bind(), name="model", _local_testing_mode=True
    )
    api = build_api(Gateway(CONFIG, {"m": handle}))
    pieces: list[bytes] = []

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.body":
                pieces.append(message["body"])
            await send(message)

        await api(scope, receive, noted)

    async def post() -> None:
        transport = httpx.ASGITransport(recorded)
        async with httpx.AsyncClient(transport=transport, base_url="http://hdserve") as client:
            await client.post(path, json={"model": "m", **BODIES[path], "stream": True})

    asyncio.run(post())
    assert all(pieces[:-1])
    assert b"text" in b"".join(pieces)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("sent", "shown"),
    [("caf\u00e9".encode(), "caf\u00e9"), (b"caf\xe9", "caf\\xe9"), (b"\xff" * 64, "\\xff" * 16)],
)
def test_an_id_may_be_any_bytes(path: str, sent: bytes, shown: str) -> None:
    """It is text in UTF-8, as bodies are; other bytes are escaped."""
    found = answer(serve.deployment(Measuring).bind(), path, {b"x-request-id": sent})
    assert found.json()["id"].endswith((f"-{shown}", f"_{shown}"))


@pytest.mark.parametrize("path", BODIES)
def test_a_header_turns_drafts_off(path: str) -> None:
    """Whatever the body says; a header that says anything else is wrong."""

    def asked(value: str) -> httpx.Response:
        model = serve.deployment(Measuring).bind()
        return answer(model, path, {"x-hdserve-speculation": value}, speculation={"enabled": True})

    assert "'is_enabled': False" in asked("off").text
    assert "'is_enabled': True" in asked("on").text
    assert asked("perhaps").json()["error"]["param"] == "x-hdserve-speculation"


@pytest.mark.parametrize("path", BODIES)
def test_proxies_pass_streams_on_at_once(path: str) -> None:
    """Nginx keeps events back for as long as nobody tells it not to."""
    model = serve.deployment(Measuring).bind()
    streamed, whole = (answer(model, path, stream=stream).headers for stream in (True, False))
    assert (streamed["x-accel-buffering"], streamed["cache-control"]) == ("no", "no-cache")
    assert "x-accel-buffering" not in whole


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    text = response.text.removesuffix("data: [DONE]\n\n")
    return [
        json.loads(line.removeprefix("data: "))
        for line in text.splitlines()
        if line.startswith("data: ")
    ]


def ended(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What came of a stream, and the error behind it; a response says after it that it failed."""
    *before, last = events
    if last.get("type") == "response.failed":
        *before, last = before
    return before, last["error"]


@pytest.mark.parametrize(("num_deltas", "stream"), [(0, True), (0, False), (2, False)])
@pytest.mark.parametrize("path", BODIES)
def test_what_takes_too_long_has_its_status(path: str, num_deltas: int, stream: bool) -> None:
    """Where no header has been sent; and clients are told not to ask again."""
    found = late_answer(path, num_deltas, stream=stream)
    assert (found.status_code, found.headers["x-should-retry"]) == (504, "false")
    assert found.json()["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_takes_too_long_ends_with_an_error(path: str) -> None:
    """As an event behind what had come; a busy machine has time for that."""
    num_texts = 0
    for timeout_s in (0.2, 2.0, 20.0):
        found = late_answer(path, 2, stream=True, timeout_s=timeout_s)
        before, error = ended(events_of(found) or [found.json()])
        assert error["code"] == "request_timeout"
        num_texts = sum('"text"' in json.dumps(event) for event in before)
        if num_texts >= 2:
            break
    assert num_texts >= 2


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_without_a_summary_ends_with_an_error(path: str) -> None:
    """As an event behind what had come."""
    events = events_of(broken_answer(path, 2, stream=True))
    assert sum('"text"' in json.dumps(event) for event in events) >= 2
    assert "without a summary" in ended(events)[1]["message"]


@pytest.mark.parametrize(
    ("error", "has_failed"),
    [(EngineStopped("broken"), True), (InvalidRequest("too much", "logprobs"), False)],
    ids=["the server's", "its own"],
)
def test_a_stream_that_fails_is_marked_in_its_trace(error: HdserveError, has_failed: bool) -> None:
    """Its status says nothing of it; one that was at fault itself is no failure."""
    trace_id = "a" * 32
    headers = {"traceparent": f"00-{trace_id}-{'b' * 16}-01"}
    with collector() as sink:
        traced = {"telemetry": TelemetryConfig(endpoint=sink.endpoint)}
        model = serve.deployment(BreakingOff).bind(1, error)
        config = CONFIG.model_copy(update=traced)
        answer(model, "/v1/completions", headers, config, stream=True)
        (span,) = sink.wait(1, trace_id)
    assert span.attributes["http.response.status_code"] == 200
    assert span.has_failed == has_failed
    assert span.attributes.get("error.type") == ("EngineStopped" if has_failed else None)


def test_a_response_that_fails_in_mid_stream_says_so_last() -> None:
    """Behind the error: some clients wait for the one, and some for the other."""
    error, failed = events_of(broken_answer("/v1/responses", 2, stream=True))[-2:]
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert failed["sequence_number"] == error["sequence_number"] + 1
    assert failed["response"]["error"]["message"] == error["message"] == error["error"]["message"]


def test_a_library_raises_where_a_response_fails_in_mid_stream() -> None:
    """Behind the text that had come."""
    handle: Any = serve.run(
        serve.deployment(BreakingOff).bind(2), name="model", _local_testing_mode=True
    )
    transport = httpx.ASGITransport(build_api(Gateway(CONFIG, {"m": handle})))

    async def read(texts: list[str]) -> None:
        async with openai.AsyncOpenAI(
            base_url="http://hdserve/v1",
            api_key="none",
            http_client=httpx.AsyncClient(transport=transport),
        ) as client:
            stream = await client.responses.create(model="m", input="hi", stream=True)
            async for event in stream:
                texts += [event.delta] if event.type == "response.output_text.delta" else []

    texts: list[str] = []
    with pytest.raises(openai.APIError, match="without a summary"):
        asyncio.run(read(texts))
    assert texts == ["text", "text"]


@pytest.mark.parametrize(("num_deltas", "stream"), [(0, True), (0, False), (2, False)])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_without_a_summary_is_an_error(path: str, num_deltas: int, stream: bool) -> None:
    """With its status, where no header has been sent."""
    found = broken_answer(path, num_deltas, stream=stream)
    assert found.status_code == 500
    assert "without a summary" in found.json()["error"]["message"]


def gateway(*, strict_requests: bool = False) -> Gateway:
    """One without models."""
    options = GatewayConfig(strict_requests=strict_requests)
    return Gateway(ServeConfig(models=CONFIG.models, gateway=options), {})


def ignored(gateway: Gateway, body: OfferedBody, *unheld: str) -> dict[str, str]:
    """The header of what of ``body`` is ignored."""

    async def receive() -> Message:
        return {"type": "http.request"}

    request = Request({"type": "http", "headers": []}, receive)
    return asyncio.run(Arrival(gateway, request).ignored_header(body, unheld))


def test_what_is_ignored_is_counted() -> None:
    """Field by field; what is refused is not."""
    gateways = {is_strict: gateway(strict_requests=is_strict) for is_strict in (False, True)}

    def num_ignored(*, is_strict: bool = False, **fields: Any) -> float | HistogramValue:
        body = CompletionBody.parse({"model": "m", "prompt": "hi", **fields})
        with pytest.raises(InvalidRequest) if is_strict else nullcontext():
            ignored(gateways[is_strict], body)
        counts = gateways[is_strict].http_metrics.samples()
        (found,) = [item for item in counts if item.name == "hdserve_ignored_fields"]
        return found.value

    assert num_ignored(temperature=0.5) == 0
    assert num_ignored(zebra=1, apple=2, store=True) == 3
    assert num_ignored(apple=2) == 4
    assert num_ignored(apple=2, is_strict=True) == 0


def test_a_body_is_asked_once_what_is_unmet() -> None:
    """And not for each field that nobody documents, as it may look through a conversation."""
    nums_asked = {}
    for num_unknown in (1, 100):
        unknown = {f"unknown{index}": 1 for index in range(num_unknown)}
        body = Counting.parse({"model": "m", "prompt": "hi", **unknown})
        Counting.num_asked = 0
        ignored(gateway(), body)
        nums_asked[num_unknown] = Counting.num_asked
    assert nums_asked[1] == nums_asked[100]


def test_what_is_left_out_is_refused_where_requests_are_strict() -> None:
    """Before what nobody documents, as it says more."""
    tools = [{"type": "web_search"}]
    body = ResponsesBody.parse({"model": "m", "input": "hi", "tools": tools, "zebra": 1})
    assert ignored(gateway(), body) == {"x-hdserve-ignored": "tools.web_search, zebra"}
    with pytest.raises(Unsupported, match=r"^tools of type 'web_search' are not supported$"):
        ignored(gateway(strict_requests=True), body)


def test_what_is_not_enforced_is_named_or_refused() -> None:
    """As what is left out; among the other names, in a header of bounded length."""
    body = CompletionBody.parse({"model": "m", "prompt": "hi", "zebra": 1, "apple": 1})
    name = "guided_json.not"
    assert ignored(gateway(), body, name) == {"x-hdserve-ignored": f"apple, {name}, zebra"}
    with pytest.raises(Unsupported, match=f"^this keyword cannot be enforced: {name}$") as caught:
        ignored(gateway(strict_requests=True), body, name)
    assert caught.value.param == "guided_json"
    many = [f"{'x' * 150}{index}" for index in range(MAX_UNHELD)]
    assert len(ignored(gateway(), body, *many)["x-hdserve-ignored"]) == 1000


RESULTS: list[tuple[type[OfferedBody], dict[str, Any], str]] = [
    (
        ChatBody,
        {
            "messages": [
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url"}]},
            ]
        },
        "messages.content.image_url",
    ),
    (
        ResponsesBody,
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [{"type": "input_image"}],
                }
            ]
        },
        "input.output.input_image",
    ),
    (
        MessagesBody,
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}
                    ],
                }
            ],
        },
        "messages.content.content.image",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "name"), RESULTS)
def test_images_in_results_of_tools_are_left_out_unless_requests_are_strict(
    kind: type[OfferedBody], fields: dict[str, Any], name: str
) -> None:
    body = kind.parse({"model": "m", **fields})
    assert ignored(gateway(), body) == {"x-hdserve-ignored": name}
    reason = rf"of type '{name.split('.')[-1]}' are not supported$"
    with pytest.raises(Unsupported, match=reason) as caught:
        ignored(gateway(strict_requests=True), body)
    assert caught.value.param == name.split(".")[0]


class Reasoning(AnswersCalls):
    """Answers with the effort it was told, and says which variables its template reads."""

    def __init__(self, *variables: str) -> None:
        self._variables = variables

    async def describe(self) -> ModelInfo:
        known = ("m", 1, "float32", "cpu", False, False, 1, 1, 1, 0, 0, 0, (), "f")
        return ModelInfo(*known, template_variables=self._variables)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Records]:
        text = f"effort {request.reasoning_effort}, {dict(request.template_options)}"
        yield Delta(0, 0, text, (1,), (0,), None, "stop"), Summary(1, 1, DraftCounts(), "r")


EFFORTS: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": ("reasoning_effort", lambda effort: {"reasoning_effort": effort}),
    "/v1/responses": ("reasoning.effort", lambda effort: {"reasoning": {"effort": effort}}),
}


@pytest.mark.parametrize("path", EFFORTS)
@pytest.mark.parametrize(
    ("variables", "effort", "is_named"),
    [
        ((), "low", True),
        (("reasoning_effort",), "low", False),
        (("enable_thinking",), "none", False),
        (("thinking",), "high", False),
        (("verbosity",), "low", True),
        ((), "none", True),
    ],
)
def test_an_effort_that_no_template_reads_is_named(
    path: str, variables: tuple[str, ...], effort: str, is_named: bool
) -> None:
    """Clients ask for one whatever the model is; where none is asked for it may think as before."""
    name, fields = EFFORTS[path]
    found = answer(serve.deployment(Reasoning).bind(*variables), path, **fields(effort))
    assert f"effort {effort}" in found.text
    assert found.headers.get("x-hdserve-ignored") == (name if is_named else None)


VERBOSITIES: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": ("verbosity", lambda value: {"verbosity": value}),
    "/v1/responses": ("text.verbosity", lambda value: {"text": {"verbosity": value}}),
}


@pytest.mark.parametrize("path", VERBOSITIES)
@pytest.mark.parametrize(
    ("variables", "value", "is_named"),
    [((), "low", True), ((), "medium", False), (("verbosity",), "high", False)],
)
def test_a_verbosity_that_no_template_reads_is_named(
    path: str, variables: tuple[str, ...], value: str, is_named: bool
) -> None:
    """But for the one that answers have anyway; the template is told of any."""
    name, fields = VERBOSITIES[path]
    found = answer(serve.deployment(Reasoning).bind(*variables), path, **fields(value))
    assert str({"verbosity": value}) in found.text
    assert found.headers.get("x-hdserve-ignored") == (name if is_named else None)


UNIQUE = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
SCHEMAS: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": (
        "response_format.json_schema.schema",
        lambda form: {"response_format": {"type": "json_schema", "json_schema": form}},
    ),
    "/v1/completions": (
        "response_format.json_schema.schema",
        lambda form: {"response_format": {"type": "json_schema", "json_schema": form}},
    ),
    "/v1/responses": (
        "text.format.schema",
        lambda form: {"text": {"format": {"type": "json_schema", **form}}},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SCHEMAS)
def test_what_of_a_schema_is_not_enforced_is_named(path: str, stream: bool) -> None:
    """Or refused, where the schema is strict; by its place in the request."""
    begin, fields = SCHEMAS[path]
    keyword = f"{begin}.properties.tags.uniqueItems"
    model = serve.deployment(Reasoning).bind()
    form = {"name": "n", "schema": UNIQUE}
    found = answer(model, path, stream=stream, **fields(form))
    assert (found.status_code, found.headers.get("x-hdserve-ignored")) == (200, keyword)
    found = answer(model, path, stream=stream, **fields({**form, "strict": True}))
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, begin.partition(".")[0])
    assert error["message"] == f"this keyword cannot be enforced: {keyword}"


def test_header_values_are_harmless() -> None:
    """Names a client made up cannot break or forge a header."""
    found = _header_value(["ok", "a\r\nset-cookie: x", "é🙂", "\x7f\x00", "\ud800", "x" * 5000])
    assert found.startswith("ok, a\\r\\nset-cookie: x, ")
    assert found.isascii()
    assert found.isprintable()
    assert len(found) == 1000
