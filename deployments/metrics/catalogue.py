"""The catalogue of all metrics, which both exporters and the tests of the dashboards read.

Names and meanings that vLLM has are vLLM's, so that its dashboards and ``vllm bench serve`` can
read them; the others begin with ``hdserve``.  Counters get ``_total`` when they are rendered.

Each series has the labels ``model_name`` and ``engine``, the replica: sums over replicas are left
to the reader, because a sum would fall, and look like a restart, when a replica goes away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

LAST_POSITION = 16
"""The label ``position`` of accepted tokens at this depth and deeper; an integer, as readers of
vLLM's metrics expect."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric.

    Attributes:
        labels: in addition to those that identify the owner of the series.
        bounds: upper ends of a histogram's buckets, without infinity.
        is_of_gateway: reported by gateways, with the label ``gateway`` instead of the replica's.
        is_per_step: a histogram of something that happens in each step of each sequence.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    is_of_gateway: bool = False
    is_per_step: bool = False

    @property
    def owner_labels(self) -> tuple[str, ...]:
        """The labels that identify the process it belongs to, before its own labels."""
        return ("gateway",) if self.is_of_gateway else ("model_name", "engine")


def _series(first: float, last: float) -> tuple[float, ...]:
    """Return 1, 2.5 and 5 times each power of ten from ``first`` to ``last``."""
    bounds, power = [], first
    while power <= last:
        bounds += [factor * power for factor in (1, 2.5, 5) if factor * power <= last]
        power *= 10
    return tuple(round(bound, 9) for bound in bounds)


_LOOKUP_S = _series(0.000001, 0.01)
_STEP_S = _series(0.0001, 10)
_REQUEST_S = _series(0.001, 1000)
_TOKENS = tuple(float(2**power) for power in range(18))
_DRAFT_TOKENS = (0.0, *_TOKENS[:9])


def _catalogue() -> Iterator[MetricInfo]:
    yield MetricInfo("vllm:num_requests_running", "gauge", "Sequences that are decoded.")
    yield MetricInfo(
        "vllm:num_requests_waiting",
        "gauge",
        "Sequences that wait for a slot, for room, or for another one that computes their prompt.",
    )
    yield MetricInfo("vllm:num_preemptions", "counter", "Sequences that had to wait for room.")
    yield MetricInfo("vllm:kv_cache_usage_perc", "gauge", "Used share of the KV cache, 0 to 1.")
    yield MetricInfo("vllm:prompt_tokens", "counter", "Prompt tokens processed.")
    yield MetricInfo(
        "vllm:prefix_cache_queries", "counter", "Prompt tokens looked for in the KV cache."
    )
    yield MetricInfo("vllm:prefix_cache_hits", "counter", "Prompt tokens found there.")
    yield MetricInfo("vllm:generation_tokens", "counter", "Tokens generated.")
    yield MetricInfo("vllm:request_success", "counter", "Ended sequences.", ("finished_reason",))
    yield MetricInfo(
        "vllm:admission_rejections",
        "counter",
        "Times a replica refused a request for lack of room in the queue (`queue_full`) or for a "
        "new grammar (`grammars`); without requests that a gateway refused itself.",
        ("reason",),
    )
    yield MetricInfo("vllm:spec_decode_num_drafts", "counter", "Verified draft trees.")
    yield MetricInfo("vllm:spec_decode_num_draft_tokens", "counter", "Drafted tokens verified.")
    yield MetricInfo("vllm:spec_decode_num_accepted_tokens", "counter", "Drafted tokens accepted.")
    yield MetricInfo(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        f"Drafted tokens accepted at this depth, from 0; {LAST_POSITION} is that and deeper.",
        ("position",),
    )
    yield from _latencies()
    yield from _own_metrics()
    yield from _gateway_metrics()


def _latencies() -> Iterator[MetricInfo]:
    for name, text, bounds in (
        ("time_to_first_token_seconds", "Arrival to first token.", _REQUEST_S),
        ("inter_token_latency_seconds", "Between the steps of one sequence.", _STEP_S),
        ("request_time_per_output_token_seconds", "Mean per token after the first.", _STEP_S),
        ("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S),
        ("request_queue_time_seconds", "Arrival to slot.", _REQUEST_S),
        ("request_prefill_time_seconds", "Slot to first token.", _REQUEST_S),
        ("request_decode_time_seconds", "First to last token.", _REQUEST_S),
        ("request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS),
        ("request_generation_tokens", "Generated tokens of a sequence.", _TOKENS),
        ("request_max_num_generation_tokens", "The same; one sequence a choice.", _TOKENS),
    ):
        is_per_step = name == "inter_token_latency_seconds"
        yield MetricInfo(f"vllm:{name}", "histogram", text, bounds=bounds, is_per_step=is_per_step)


def _own_metrics() -> Iterator[MetricInfo]:
    for name, text, *labels in (
        ("steps", "Engine steps: one forward each."),
        ("step_seconds", "Time of the steps by part.", "part"),
        ("drafts", "Verified draft trees with tokens of a source.", "source"),
        ("draft_tokens", "Drafted tokens verified, by source.", "source"),
        ("accepted_tokens", "Drafted tokens accepted, by source.", "source"),
        (
            "accepted_tokens_per_pos",
            f"The same at this depth, from 0; {LAST_POSITION} is that and deeper.",
            "source",
            "position",
        ),
        ("drafter_seconds", "Time in drafters; `propose` is the look-up.", "drafter", "call"),
        ("drafter_failures", "Failed calls of drafters.", "drafter", "call"),
        (
            "budget_proposed_tokens",
            "Drafted tokens before the budget cut them, without those of hopelessly low score.",
        ),
        ("budget_kept_tokens", "Drafted tokens the budget kept."),
        ("mirror_outputs", "Outputs shared with the cluster.", "direction"),
        ("database_fallbacks", "Times a database could not be used.", "reason"),
        (
            "database_evictions",
            "What namespaces of the model databases gave up to make room for others.",
            "unit",
        ),
    ):
        yield MetricInfo(f"hdserve_{name}", "counter", text, tuple(labels))
    yield MetricInfo(
        "hdserve_lookup_seconds",
        "histogram",
        "A draft of 16 tokens from one source alone; a sample a report.",
        ("source",),
        _LOOKUP_S,
    )
    yield MetricInfo(
        "hdserve_step_draft_tokens",
        "histogram",
        "Tokens drafted for one sequence in one step, 0 if the budget wanted none.",
        bounds=_DRAFT_TOKENS,
        is_per_step=True,
    )
    for name, text, *labels in (
        ("slots", "Sequences that can be decoded together."),
        ("drafter_sequences", "Sequences with drafter state."),
        ("kv_cache_tokens", "Size of the KV cache."),
        ("database_entries", "Texts, contexts or calibrations in a database.", "database"),
        (
            "database_bytes",
            "Memory of a database; `calibration` is what drafting has learned.",
            "database",
        ),
        (
            "mirror_age_seconds",
            "Since the last answer of the model database's actor, or since the start.",
        ),
        ("mirror_queued_bytes", "Waiting to be published."),
        (
            "mirror_unwritten_actors",
            "Actors of the model database that cannot write to snapshot_dir.",
        ),
    ):
        yield MetricInfo(f"hdserve_{name}", "gauge", text, tuple(labels))


def _gateway_metrics() -> Iterator[MetricInfo]:
    yield MetricInfo(
        "hdserve_http_requests",
        "counter",
        "Answered HTTP requests.",
        ("route", "status"),
        is_of_gateway=True,
    )
    yield MetricInfo(
        "hdserve_stream_errors",
        "counter",
        "Streams that ended with an error that would have been a 5xx, but came after the status.",
        ("route",),
        is_of_gateway=True,
    )
    yield MetricInfo(
        "hdserve_ignored_fields",
        "counter",
        "Fields of requests that were ignored; the header x-hdserve-ignored names them.",
        is_of_gateway=True,
    )
    yield MetricInfo(
        "hdserve_request_timeouts",
        "counter",
        "Answers that request_timeout_s cut off before the model had given all of them.",
        ("model_name",),
        is_of_gateway=True,
    )
    yield MetricInfo(
        "hdserve_replica_silences",
        "counter",
        "Answers that ended because their replica was silent for max_replica_silence_s.",
        ("model_name",),
        is_of_gateway=True,
    )
    for name, text in (
        (
            "hdserve_http_first_byte_seconds",
            "Request to the first byte of the body; what keeps a silent stream alive is none.",
        ),
        ("hdserve_http_request_seconds", "Request to the last byte of the body."),
    ):
        yield MetricInfo(name, "histogram", text, ("route",), _REQUEST_S, is_of_gateway=True)


METRICS: Mapping[str, MetricInfo] = {metric.name: metric for metric in _catalogue()}
"""All metrics by name."""
