"""How long the requests of one replica had to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.metrics.samples import Histogram, Observations, Sample
from hdserve.core import Sequence, StepOutput
from hdserve.errors import GrammarsOverloaded, Overloaded

_FULL, _GRAMMARS = "queue_full", "grammars"
"""Why requests are refused."""

_PER_STEP = "vllm:inter_token_latency_seconds"
_PER_REQUEST = (
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
)


class RequestMetrics:
    """Counts latencies and refusals; thread-safe.

    Attributes:
        observations: values that are observed once per request, for Ray.
    """

    def __init__(self) -> None:
        self.observations = Observations()
        self._lock = threading.Lock()
        self._histograms = {_PER_STEP: Histogram(_PER_STEP)} | {
            name: Histogram(name, observations=self.observations) for name in _PER_REQUEST
        }
        self._num_refused = {_FULL: 0, _GRAMMARS: 0}

    def clock(self, seq: Sequence, arrived_s: float) -> RequestClock:
        """Return the clock of a sequence whose request arrived at the monotonic time
        ``arrived_s``."""
        return RequestClock(seq, self, arrived_s)

    def observe(self, name: str, value: float) -> None:
        """Count one value of the metric ``name``, in its unit."""
        with self._lock:
            self._histograms[name].observe(value)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count a request that is answered within the block once if it is refused because one or
        all of its sequences, or its grammar, have no room."""
        try:
            yield
        except Overloaded as error:
            reason = _GRAMMARS if isinstance(error, GrammarsOverloaded) else _FULL
            with self._lock:
                self._num_refused[reason] += 1
            raise

    def samples(self) -> Iterator[Sample]:
        """Yield all latencies and refusals so far."""
        with self._lock:
            samples = [histogram.sample() for histogram in self._histograms.values()]
            num_refused = tuple(self._num_refused.items())
        yield from samples
        for reason, count in num_refused:
            yield Sample("vllm:admission_rejections", count, (reason,))


class RequestClock:
    """Records the times of one sequence."""

    def __init__(self, seq: Sequence, metrics: RequestMetrics, arrived_s: float) -> None:
        self._seq = seq
        self._observe = metrics.observe
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def first_token_s(self) -> float | None:
        """The seconds from arrival to the first token, once it has come."""
        return None if self._first_s is None else self._first_s - self._arrived_s

    def observe(self, output: StepOutput) -> None:
        """Note one output, in the order of the steps."""
        now_s = time.monotonic()
        if output.token_ids:
            if self._first_s is None:
                self._note_first(now_s)
            else:
                self._observe(_PER_STEP, now_s - self._last_s)
            self._last_s = now_s
        if output.finish_reason is not None:
            self._note_end(now_s)

    def _note_first(self, now_s: float) -> None:
        self._first_s = now_s
        admitted_s = self._seq.admitted_s or self._arrived_s
        self._observe("vllm:request_queue_time_seconds", max(0.0, admitted_s - self._arrived_s))
        self._observe("vllm:request_prefill_time_seconds", now_s - admitted_s)
        self._observe("vllm:time_to_first_token_seconds", now_s - self._arrived_s)

    def _note_end(self, now_s: float) -> None:
        seq, observe = self._seq, self._observe
        observe("vllm:e2e_request_latency_seconds", now_s - self._arrived_s)
        observe("vllm:request_prompt_tokens", seq.num_prompt_tokens)
        observe("vllm:request_generation_tokens", seq.num_output_tokens)
        observe("vllm:request_max_num_generation_tokens", seq.num_output_tokens)
        if self._first_s is not None:
            decode_s = now_s - self._first_s
            observe("vllm:request_decode_time_seconds", decode_s)
            if seq.num_output_tokens > 1:
                per_token_s = decode_s / (seq.num_output_tokens - 1)
                observe("vllm:request_time_per_output_token_seconds", per_token_s)
