"""Traces, as a collector gets them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.gateway import Gateway
from deployments.generation import GenerationRequest, Summary
from deployments.http.routes import build_api
from deployments.http.tracing import TracedRequests, trace_of
from deployments.tracing import SequenceTrace, Tracing
from hdserve.config import TelemetryConfig, default_config, parse_config
from hdserve.core import FinishReason, SamplingParams, Sequence, Source, StepOutput
from hdserve.engine.stats import count_draft
from hdserve.errors import ConfigError, InvalidRequest
from hdserve.tree import Acceptance, DraftTree
from tests.collector import CollectedSpan, Collector, collector
from tests.serving import ServedApplication

MODEL = "hdserve-mini"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
OTHER_TRACE_ID = "d" * 32
NUM_SHORT = 20
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECRET = "zebra"

LEAVING = """
import sys
from types import SimpleNamespace
from deployments.replica.model_server import ModelServer
from deployments.tracing import Tracing
from hdserve.config import TelemetryConfig

server = object.__new__(ModelServer)
server._sharing, server._engine = None, SimpleNamespace(num_open=0)
server._tracing = Tracing(TelemetryConfig(endpoint=sys.argv[1]), "leaving")
server._tracing.start_http("POST", {"traceparent": sys.argv[2]}).end()
server._leave()
"""


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    with collector() as found:
        yield found


def make_request(**fields: Any) -> GenerationRequest:
    trace = {"traceparent": TRACEPARENT}
    return GenerationRequest("r", prompts=(SECRET,), **{"trace": trace, **fields})


def make_sequence(tracing_s: float) -> Sequence:
    seq = Sequence("r/0/0", [1, 2, 3], SamplingParams())
    seq.admitted_s = tracing_s
    return seq


def test_numbers_that_no_trace_can_have_are_texts(sink: Collector) -> None:
    """A seed may be larger; the others are refused later."""
    tracing = Tracing(TelemetryConfig(endpoint=sink.endpoint, sample_ratio=0.0), "tested")
    sampling = {"seed": 2**64 - 1, "top_k": 10**400, "temperature": 0.5}
    trace_id = "b" * 32
    trace = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    with tracing.generation(make_request(sampling=sampling, trace=trace), "large"):
        pass
    tracing.close()
    (span,) = sink.wait(1, trace_id)
    assert span.attributes["gen_ai.request.seed"] == "18446744073709551615"
    assert span.attributes["gen_ai.request.top_k"] == "1" + "0" * 19
    assert span.attributes["gen_ai.request.temperature"] == 0.5


def test_a_generation_becomes_spans(sink: Collector) -> None:
    """Queue, prefill, decode and as many steps as are wanted, one after the other, with what
    drafting did."""
    config = TelemetryConfig(endpoint=sink.endpoint, sample_ratio=0.0, max_steps=2)
    tracing, trace_id = Tracing(config, "tested"), "c" * 32
    request = make_request(
        sampling={"temperature": 0.5, "max_tokens": 9},
        trace={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"},
    )
    with tracing.generation(request, "m") as trace:
        seq = make_sequence(time.monotonic())
        spans = trace.sequence(seq, time.monotonic())
        seq.admitted_s = time.monotonic()
        for number in range(4):
            tree = DraftTree(3, 8)
            tree.add_path([4, 5], Source.CONTEXT)
            seq.token_ids += [4, 9]
            seq.counts.num_steps += 1
            seq.finish_reason = FinishReason.LENGTH if number == 3 else None
            spans.observe(StepOutput(seq, (4, 9), (Source.CONTEXT, Source.PLAIN), draft=tree))
        seq.counts.num_drafts, seq.counts.num_accepted_tokens = 4, 4
        seq.counts.accepted_by_depth = {Source.CONTEXT: [4]}
        spans.end()
        trace.summarise(Summary(3, 8, seq.counts, "replica-7"))
    tracing.close()
    root, queue, prefill, decode, *steps = sink.wait(6, trace_id)
    assert (root.service, root.name) == ("tested", "text_completion m")
    assert (root.parent_id, root.has_failed) == (PARENT_ID, False)
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert root.attributes["gen_ai.request.max_tokens"] == 9
    assert root.attributes["gen_ai.usage.input_tokens"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["hdserve.mean_acceptance_length"] == 2.0
    assert root.attributes["hdserve.num_accepted_tokens.context"] == 4
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert {span.parent_id for span in (queue, prefill, decode)} == {root.span_id}
    assert root.begin_ns <= queue.begin_ns <= queue.end_ns == prefill.begin_ns
    assert prefill.end_ns == decode.begin_ns
    assert decode.end_ns <= root.end_ns
    assert [span.name for span in steps] == ["step", "step"]
    assert {span.parent_id for span in steps} == {decode.span_id}
    assert steps[0].begin_ns == decode.begin_ns
    assert steps[0].end_ns == steps[1].begin_ns
    assert steps[1].attributes == {
        "hdserve.num_tokens": 2,
        "hdserve.num_draft_tokens": 2,
        "hdserve.num_accepted_tokens": 1,
    }
    assert SECRET not in repr(sink.spans)


CONTEXT, PLAIN = Source.CONTEXT, Source.PLAIN


@pytest.mark.parametrize(
    ("token_ids", "sources", "num_accepted"),
    [
        ((4, 5, 9), (CONTEXT, CONTEXT, PLAIN), 2),
        ((4, 5), (CONTEXT, CONTEXT), 1),
        ((4,), (CONTEXT,), 0),
        ((), (), 0),
    ],
    ids=["whole", "cut off", "at the first token", "failed"],
)
def test_steps_count_as_their_answer_does(
    sink: Collector,
    token_ids: tuple[int, ...],
    sources: tuple[Source, ...],
    num_accepted: int,
) -> None:
    """The last token of a step is no accepted one, also where the answer ends within a draft."""
    config = TelemetryConfig(endpoint=sink.endpoint, sample_ratio=0.0)
    tracing, trace_id = Tracing(config, "tested"), f"{len(token_ids):x}" * 31 + "d"
    tree = DraftTree(3, 8)
    tree.add_path([4, 5], CONTEXT)
    seq = make_sequence(time.monotonic())
    if token_ids:
        used = Acceptance(range(len(token_ids)), token_ids)
        count_draft(tree, used, seq.counts)
    request = make_request(trace={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"})
    with tracing.generation(request, "m") as trace:
        spans = trace.sequence(seq, time.monotonic())
        seq.admitted_s = time.monotonic()
        spans.observe(StepOutput(seq, (3,), (PLAIN,)))
        spans.observe(StepOutput(seq, token_ids, sources, draft=tree))
        spans.end()
    tracing.close()
    by_name = {span.name: span for span in sink.wait(5, trace_id)}
    for name in ("decode", "step"):
        assert by_name[name].attributes["hdserve.num_accepted_tokens"] == num_accepted


def test_spans_tell_choices_of_several_prompts_apart(sink: Collector) -> None:
    """By the indices that they have in the answer."""
    tracing, trace_id = Tracing(TelemetryConfig(endpoint=sink.endpoint), "tested"), "5" * 32
    request = make_request(trace={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"})
    with tracing.generation(request, "m") as trace:
        for request_id in ("r/0/0", "r/1/0"):
            seq = Sequence(request_id, [1, 2, 3], SamplingParams())
            spans = trace.sequence(seq, time.monotonic())
            seq.admitted_s = time.monotonic()
            spans.observe(StepOutput(seq, (3,), (Source.PLAIN,)))
            spans.end()
    tracing.close()
    found = [span for span in sink.wait(7, trace_id) if span.name == "decode"]
    assert [span.attributes["hdserve.choice_index"] for span in found] == [0, 1]


def http_span(
    sink: Collector, app: ASGIApp, trace_id: str, *headers: tuple[bytes, bytes], **state: float
) -> CollectedSpan:
    """The span of a request that ``app`` answers with nothing."""
    tracing = Tracing(TelemetryConfig(endpoint=sink.endpoint), "tested")
    parent = (b"traceparent", f"00-{trace_id}-{PARENT_ID}-01".encode())
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "state": state}
    scope["headers"] = [parent, *headers]

    async def unused(*_message: Message) -> Any:
        raise AssertionError

    with suppress(RuntimeError, asyncio.CancelledError):
        asyncio.run(TracedRequests(app, tracing)(scope, unused, unused))
    tracing.close()
    (span,) = sink.wait(1, trace_id)
    return span


def test_the_end_does_not_wait_for_a_collector_that_never_answers() -> None:
    """The connection is still open then; what gives up closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"
        tracing = Tracing(TelemetryConfig(endpoint=endpoint, sample_ratio=1.0), "tested")
        span = tracing.start_http("POST", {})
        assert span is not None
        span.end()
        tracing.close()
        with server.accept()[0] as connection:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                list(iter(partial(connection.recv, 2**16), b""))


def test_what_a_replica_did_before_its_engine_failed_is_sent(sink: Collector) -> None:
    """It shows why; the process ends before spans are sent as always."""
    trace_id = "6" * 32
    traceparent = f"00-{trace_id}-{PARENT_ID}-01"
    command = [sys.executable, "-c", LEAVING, sink.endpoint, traceparent]
    assert subprocess.run(command, check=False).returncode == 1
    (span,) = sink.wait(1, trace_id)
    assert span.service == "leaving"


def leave(spans: SequenceTrace) -> None:
    spans.end()
    raise GeneratorExit


def test_what_fails_is_marked(sink: Collector) -> None:
    """A request that is refused, and one whose client goes away while it waits, since it
    arrived."""
    trace_id = "1" * 32
    tracing = Tracing(TelemetryConfig(endpoint=sink.endpoint), "tested")
    request = make_request(trace={"traceparent": f"00-{trace_id}-{PARENT_ID}-01"})
    with pytest.raises(InvalidRequest), tracing.generation(request, "m"):
        raise InvalidRequest(f"{SECRET} is wrong", "prompt")
    with pytest.raises(GeneratorExit), tracing.generation(request, "m") as trace:
        leave(trace.sequence(Sequence("r/0/0", [1], SamplingParams()), time.monotonic() - 5))
    tracing.close()
    queue, refused, gone = sink.wait(3, trace_id)
    assert refused.has_failed
    assert gone.has_failed
    assert refused.attributes["error.type"] == "InvalidRequest"
    assert gone.attributes["error.type"] == "GeneratorExit"
    assert (queue.name, queue.parent_id) == ("queue", gone.span_id)
    assert queue.end_ns - queue.begin_ns > 5e9
    assert SECRET not in repr(sink.spans)


def test_what_is_not_sampled_is_not_sent(sink: Collector) -> None:
    """The client's decision holds; without one the ratio decides; without a collector nothing
    is made."""
    traced = Tracing(TelemetryConfig(endpoint=sink.endpoint, sample_ratio=0.0), "tested")
    assert traced.start_http("POST", {}) is None
    assert traced.start_http("POST", {"traceparent": TRACEPARENT.replace("-01", "-00")}) is None
    assert traced.start_http("POST", {"traceparent": "00-nonsense"}) is None
    span = traced.start_http("POST", {"traceparent": TRACEPARENT})
    assert span is not None
    span.end()
    always = Tracing(TelemetryConfig(endpoint=sink.endpoint, sample_ratio=1.0), "tested")
    assert always.start_http("POST", {}) is not None
    off = Tracing(TelemetryConfig(), "tested")
    assert not off.is_on
    assert off.start_http("POST", {"traceparent": TRACEPARENT}) is None
    for tracing in (traced, always, off):
        tracing.close()


def test_only_the_api_is_traced(sink: Collector) -> None:
    """Refused requests too, with the route and the status; probes are not."""
    config = default_config().model_copy(
        update={"telemetry": TelemetryConfig(endpoint=sink.endpoint, sample_ratio=1.0)}
    )
    trace_id = "2" * 32
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    gateway = Gateway(config, {})
    with TestClient(build_api(gateway)) as client:
        assert client.get("/health", headers=headers).status_code == 200
        assert client.get("/v1/models", headers=headers).status_code == 200
        body = {"model": "none", "messages": [{"role": "user", "content": SECRET}]}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 404
    gateway.tracing.close()
    models, chat = sink.wait(2, trace_id)
    assert models.name == "GET /v1/models"
    assert chat.name == "POST /v1/chat/completions"
    assert chat.attributes["http.response.status_code"] == 404
    assert (chat.service, chat.parent_id, chat.has_failed) == ("hdserve-gateway", PARENT_ID, False)
    assert len([span for span in sink.spans if span.trace_id == trace_id]) == 2


def test_a_state_may_come_in_several_headers(sink: Collector) -> None:
    """They are one list, in their order."""
    found: dict[str, str] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(trace_of(Request(scope)))

    http_span(sink, app, "3" * 32, (b"tracestate", b"a=1"), (b"tracestate", b"b=2"))
    assert found["tracestate"] == "a=1,b=2"


def test_the_span_of_a_request_begins_when_it_arrives(sink: Collector) -> None:
    """It may wait in the gateway before it is looked at."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    span = http_span(sink, app, "4" * 32, arrived_s=time.monotonic() - 7)
    assert span.end_ns - span.begin_ns >= 7e9


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError, 500), (asyncio.CancelledError, 499)], ids=["500", "499"]
)
def test_a_request_that_is_not_answered_has_the_status_of_its_metrics(
    sink: Collector, error: type[BaseException], status: int
) -> None:
    """The answer to an unexpected error is made outside; of one that is given up there is none."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    span = http_span(sink, app, f"{status}e" * 8)
    assert span.has_failed
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["error.type"] == error.__name__


def test_what_clients_send_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Where a state is malformed, that would be as much of it as they like."""
    endpoint = "http://127.0.0.1:1/v1/traces"
    tracing = Tracing(TelemetryConfig(endpoint=endpoint, sample_ratio=0.0), "tested")
    logging.getLogger("opentelemetry").addHandler(caplog.handler)
    tracing.start_http("POST", {"traceparent": TRACEPARENT, "tracestate": SECRET})
    logging.getLogger("opentelemetry").removeHandler(caplog.handler)
    tracing.close()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://a/b", "http://", "http://a b/"])
def test_wrong_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.endpoint"):
        parse_config({"models": [{"name": "a", "model": "b"}], "telemetry": {"endpoint": endpoint}})


@pytest.mark.ray
@pytest.mark.slow
def test_one_trace_from_the_client_to_the_steps(tmp_path: Path) -> None:
    """Through a real gateway and a real replica, each a process of its own; requests whose clients
    do not ask for it are traced by the ratio alone."""
    with collector() as sink:
        config = {
            "models": [{"name": MODEL, "model": MODEL, "drafting": {"adapts_budget": False}}],
            "telemetry": {"endpoint": sink.endpoint, "sample_ratio": 0.0},
        }
        served = ServedApplication(tmp_path, config)
        try:
            served.wait_ready()
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"A table for two, {SECRET}, {SECRET}."}],
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
            }
            url = f"{served.base_url}/v1/chat/completions"
            assert httpx.post(url, json=body, timeout=60).status_code == 200
            traced = {"traceparent": TRACEPARENT}
            answer = httpx.post(url, json=body, headers=traced, timeout=60).json()
            counts = answer["metrics"]["speculative_decoding"]
            spans = sink.wait(4 + counts["num_steps"], TRACE_ID)
            short = {**body, "max_tokens": 1}
            for number in range(NUM_SHORT):
                of_other = {"traceparent": TRACEPARENT.replace(TRACE_ID, OTHER_TRACE_ID)}
                streamed = {**short, "stream": number % 2 == 0}
                httpx.post(url, json=streamed, headers=of_other, timeout=60).raise_for_status()
            others = sink.wait(5 * NUM_SHORT, OTHER_TRACE_ID)
        finally:
            served.stop()
        assert {span.trace_id for span in sink.spans} == {TRACE_ID, OTHER_TRACE_ID}
        assert not [span.name for span in (*spans, *others) if span.has_failed]
        by_name = {span.name: span for span in spans}
        http, chat = by_name["POST /v1/chat/completions"], by_name[f"chat {MODEL}"]
        assert (http.service, http.parent_id) == ("hdserve-gateway", PARENT_ID)
        assert (chat.service, chat.parent_id) == ("hdserve-model", http.span_id)
        assert chat.attributes["hdserve.replica"] == answer["metrics"]["replica"]
        assert chat.attributes["gen_ai.usage.output_tokens"] == 24
        num_accepted = counts["num_accepted_draft_tokens"]
        assert chat.attributes["hdserve.num_accepted_tokens"] == num_accepted > 0
        decode = by_name["decode"]
        assert decode.attributes["hdserve.num_steps"] == counts["num_steps"]
        steps = [span for span in spans if span.name == "step"]
        assert len(steps) == counts["num_steps"] - 1
        assert {span.parent_id for span in steps} == {decode.span_id}
        assert http.begin_ns <= chat.begin_ns <= decode.begin_ns <= decode.end_ns <= http.end_ns
        assert SECRET not in repr(sink.spans)
