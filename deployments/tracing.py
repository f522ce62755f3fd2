"""Traces in OpenTelemetry's form, sent to a collector; off unless the configuration names one.

The gateway continues the trace of the client's ``traceparent`` header (W3C Trace Context), or
starts one, and passes it to the replica::

    POST /v1/chat/completions            gateway; names of the HTTP semantic conventions
    └─ chat hdserve-tiny                 replica; names of the conventions for generative AI
       ├─ queue                          arrival to slot
       ├─ prefill                        slot to first token
       └─ decode                         first to last token, with what drafting did
          ├─ step                        one verified tree: tokens, drafted, accepted
          └─ ...

Spans contain names, numbers and times, and neither prompts nor answers.  What is not sampled costs
a comparison.  A collector that is slow or gone loses spans, never requests: a separate thread sends
them, from a queue of bounded length.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from actors.logs import log_tracing_with_serve
from deployments.generation import GenerationRequest, Summary
from hdserve.config import TelemetryConfig
from hdserve.core import MAX_INTEGER, DraftCounts, Sequence, Source, StepOutput
from hdserve.telemetry import check_tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

Carrier = Mapping[str, str]
"""The headers that identify a span: ``traceparent``, and perhaps ``tracestate``."""

LAST_SPANS_S = 0.5
"""How long the end of a process waits for the spans that are not sent yet."""

_EXPORT_INTERVAL_MS = 1000
_EXPORT_TIMEOUT_S = 5.0
_REQUEST_ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


class Tracing:
    """The spans of one process.

    Args:
        service: ``service.name`` of the spans' resource.
    """

    def __init__(self, config: TelemetryConfig, service: str) -> None:
        self._config = config
        self._tracer: Tracer | None = None
        self._provider: Any = None
        if config.endpoint is not None:
            check_tracing(config)
            log_tracing_with_serve()
            self._provider = _provider(config, service)
            self._tracer = self._provider.get_tracer("hdserve", version("hdserve"))

    @property
    def is_on(self) -> bool:
        """Whether spans are sent to a collector."""
        return self._tracer is not None

    def start_http(
        self, method: str, carrier: Carrier, arrived_s: float | None = None
    ) -> Span | None:
        """Start the span of an HTTP request that has arrived; ``None`` if it is not sampled.

        Args:
            carrier: of the client's span, if it sent one.
            arrived_s: the monotonic time at which the request arrived; default: now.
        """
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            method,
            _context(carrier),
            SpanKind.SERVER,
            attributes={"http.request.method": method},
            start_time=None if arrived_s is None else _offset_ns() + int(arrived_s * 1e9),
        )
        return span if span.is_recording() else None

    @contextmanager
    def generation(self, request: GenerationRequest, model: str) -> Iterator[GenerationTrace]:
        """Keep the span of a request to a model open while the block runs."""
        trace = GenerationTrace(self._start(request, model), self._tracer, self._config.max_steps)
        try:
            yield trace
        except BaseException as error:
            trace.fail(error)
            raise
        finally:
            trace.end()

    def close(self) -> None:
        """Send the remaining spans, and end; if that takes long, it is not waited for."""
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
            closing.start()
            closing.join(LAST_SPANS_S)

    def _start(self, request: GenerationRequest, model: str) -> Span | None:
        if self._tracer is None or not request.trace:
            return None
        from opentelemetry.trace import SpanKind

        operation = "chat" if request.messages else "text_completion"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "hdserve",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": request.num_choices,
            "hdserve.request_id": request.request_id,
            "hdserve.namespace": request.namespace,
        }
        for name, attribute in _REQUEST_ATTRIBUTES.items():
            if name in request.sampling:
                value = request.sampling[name]
                is_writable = abs(value) <= MAX_INTEGER  # a seed may be larger
                attributes[attribute] = value if is_writable else str(value)[:20]
        span = self._tracer.start_span(
            f"{operation} {model}", _context(request.trace), SpanKind.SERVER, attributes=attributes
        )
        return span if span.is_recording() else None


class GenerationTrace:
    """The span of one request in its replica; without a span it does nothing."""

    def __init__(self, span: Span | None, tracer: Tracer | None, max_steps: int) -> None:
        self._span = span
        self._tracer = tracer
        self._max_steps = max_steps
        self._sequences: list[Sequence] = []

    def sequence(self, seq: Sequence, arrived_s: float) -> SequenceTrace:
        """Return what makes the spans of the next choice, in the order of the answer, whose request
        arrived at the monotonic time ``arrived_s``."""
        index = len(self._sequences)
        if self._span is not None:
            self._sequences.append(seq)
        return SequenceTrace(seq, index, arrived_s, self._span, self._tracer, self._max_steps)

    def summarise(self, summary: Summary) -> None:
        """Record on the span that the request was answered."""
        if self._span is None:
            return
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [
                    str(seq.finish_reason) for seq in self._sequences
                ],
                "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
                "gen_ai.usage.output_tokens": summary.num_output_tokens,
                "hdserve.replica": summary.replica,
                **_draft_attributes(summary.drafts),
            }
        )

    def fail(self, error: BaseException) -> None:
        """Record on the span that the request ended with ``error``, or because its client went
        away."""
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """End the span; nothing more belongs to the request."""
        if self._span is not None:
            self._span.end()


class SequenceTrace:
    """Makes the spans of one choice when it has ended, from the recorded times; without a parent it
    makes none.

    Args:
        index: of the choice among all of the answer.
    """

    def __init__(
        self,
        seq: Sequence,
        index: int,
        arrived_s: float,
        parent: Span | None,
        tracer: Tracer | None,
        max_steps: int,
    ) -> None:
        self._seq = seq
        self._index = index
        self._parent = parent
        self._tracer = tracer
        self._max_steps = max_steps
        self._offset_ns = _offset_ns()
        self._arrived_s = arrived_s
        self._step_ends_s: list[float] = []
        self._steps: list[dict[str, int]] = []

    def observe(self, output: StepOutput) -> None:
        """Note one output, in the order of the steps."""
        if self._parent is None:
            return
        self._step_ends_s.append(time.monotonic())
        if 1 < len(self._step_ends_s) <= self._max_steps + 1:
            self._steps.append(_step_attributes(output))

    def end(self) -> None:
        """Make the spans of the choice, which has ended for whatever reason."""
        if self._parent is None:
            return
        seq, ended_s = self._seq, time.monotonic()
        choice = {"hdserve.choice_index": self._index}
        admitted_s = seq.admitted_s
        parent = self._parent
        self._span("queue", parent, self._arrived_s, admitted_s or ended_s, choice)
        if admitted_s is None:
            return
        first_s = self._step_ends_s[0] if self._step_ends_s else ended_s
        prompt = {**choice, "gen_ai.usage.input_tokens": seq.num_prompt_tokens}
        self._span("prefill", parent, admitted_s, first_s, prompt)
        if not self._step_ends_s:
            return
        answer = {
            **choice,
            "gen_ai.usage.output_tokens": seq.num_output_tokens,
            **_draft_attributes(seq.counts),
        }
        decode = self._span("decode", parent, first_s, self._step_ends_s[-1], answer)
        times_s = self._step_ends_s
        for begin_s, end_s, attributes in zip(times_s, times_s[1:], self._steps, strict=False):
            self._span("step", decode, begin_s, end_s, attributes)

    def _span(
        self,
        name: str,
        parent: Span,
        begin_s: float,
        end_s: float,
        attributes: Mapping[str, Any],
    ) -> Span:
        """Make a span that has already ended."""
        from opentelemetry.trace import set_span_in_context

        assert self._tracer is not None
        context, begin_ns = set_span_in_context(parent), self._ns(begin_s)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=begin_ns)
        span.end(max(begin_ns, self._ns(end_s)))
        return span

    def _ns(self, monotonic_s: float) -> int:
        return self._offset_ns + int(monotonic_s * 1e9)


def _offset_ns() -> int:
    """Return what a monotonic time lacks to the time of spans, in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()


def _draft_attributes(counts: DraftCounts) -> dict[str, Any]:
    """Return what drafting did, as attributes of a span."""
    found: dict[str, Any] = {
        "hdserve.num_steps": counts.num_steps,
        "hdserve.num_drafts": counts.num_drafts,
        "hdserve.num_draft_tokens": counts.num_draft_tokens,
        "hdserve.num_accepted_tokens": counts.num_accepted_tokens,
    }
    if counts.mean_acceptance_length is not None:
        found["hdserve.mean_acceptance_length"] = counts.mean_acceptance_length
    for source, count in counts.accepted_by_source.items():
        found[f"hdserve.num_accepted_tokens.{source.label}"] = count
    return found


def _step_attributes(output: StepOutput) -> dict[str, int]:
    """Return what a step did; its last token is not accepted, as in :class:`DraftCounts`, even if
    it was drafted: the answer ends with it."""
    num_drafted = output.draft.num_draft_tokens if output.draft is not None else 0
    num_from_draft = sum(source is not Source.PLAIN for source in output.sources)
    num_tokens = len(output.token_ids)
    return {
        "hdserve.num_tokens": num_tokens,
        "hdserve.num_draft_tokens": num_drafted,
        "hdserve.num_accepted_tokens": max(0, min(num_from_draft, num_tokens - 1)),
    }


def _context(carrier: Carrier) -> Any:
    """Return the remote parent that ``carrier`` names, or none if it is malformed."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier, Context())


def _provider(config: TelemetryConfig, service: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create({"service.name": service, "service.version": version("hdserve")})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)), resource=resource
    )
    exporter = OTLPSpanExporter(config.endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_INTERVAL_MS)
    )
    return provider
