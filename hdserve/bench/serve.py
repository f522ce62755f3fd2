"""The figures of a load, with the keys of ``vllm bench serve``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hdserve.bench.load import Load
from hdserve.bench.request_record import Outcome, RequestRecord

PERCENTILES = (50, 90, 99)

_STATISTICS: Mapping[str, Callable[[Any], Any]] = {
    "mean": np.mean,
    "median": np.median,
    "std": np.std,
    **{f"p{share}": partial(np.percentile, q=share) for share in PERCENTILES},
}

_NUM_REASONS = 5
"""The most reasons for failed, or rejected, requests that are listed."""


def as_result(load: Load, goodput: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Throughput and latencies of the requests that completed.

    Times to the first token (``ttft``), per token after it (``tpot``), between chunks (``itl``) and
    to the end (``e2el``) are in milliseconds.  A chunk of a server that drafts holds several
    tokens, so ``itl`` is not a time per token; ``tpot`` is.  Missing figures are ``None``.

    Args:
        goodput: most milliseconds of a good request, by ``ttft``, ``tpot`` and ``e2el``.
    """
    completed = [record for record in load.records if record.outcome is Outcome.COMPLETED]
    outcomes = Counter(record.outcome for record in load.records)
    num_input = sum(record.num_prompt_tokens for record in completed)
    num_output = sum(record.num_output_tokens for record in completed)
    plan, duration_s = load.plan, load.duration_s
    is_unlimited = np.isinf(plan.request_rate)
    return {
        "num_prompts": plan.num_prompts,
        "num_repeated_prompts": load.num_repeated,
        "max_concurrency": plan.concurrency,
        "request_rate": "inf" if is_unlimited else plan.request_rate,
        "burstiness": plan.burstiness,
        "seed": plan.seed,
        "interrupted": load.is_interrupted,
        "duration": duration_s,
        "completed": outcomes[Outcome.COMPLETED],
        "rejected": outcomes[Outcome.REJECTED],
        "failed": outcomes[Outcome.FAILED],
        "failures": _reasons(load.records, Outcome.FAILED),
        "rejections": _reasons(load.records, Outcome.REJECTED),
        "num_sent_again": sum(record.is_sent_again for record in load.records),
        "num_without_usage": sum(not record.has_usage for record in completed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(completed) / duration_s,
        "request_goodput": _goodput(completed, goodput, duration_s),
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(completed),
        "max_concurrent_requests": _peak_concurrency(load.records),
        **dict(_latencies(completed)),
    }


def details(records: Iterable[RequestRecord]) -> dict[str, list[Any]]:
    """Return one entry per request, for figures of your own."""
    rows = list(records)
    return {
        "names": [record.name for record in rows],
        "outcomes": [record.outcome for record in rows],
        "start_times": [record.started_s for record in rows],
        "input_lens": [record.num_prompt_tokens for record in rows],
        "output_lens": [record.num_output_tokens for record in rows],
        "ttfts": [record.ttft_s for record in rows],
        "itls": [record.itls_s for record in rows],
        "e2els": [record.e2el_s for record in rows],
        "generated_texts": [record.text for record in rows],
        "errors": [record.error for record in rows],
    }


def _reasons(records: Sequence[RequestRecord], outcome: Outcome) -> dict[str, int]:
    """Return how many requests ended so for each of the commonest reasons, and for others."""
    errors = Counter(item.error for item in records if item.outcome is outcome)
    told = dict(errors.most_common(_NUM_REASONS))
    num_others = errors.total() - sum(told.values())
    return told | ({"other reasons": num_others} if num_others else {})


def _latencies(completed: Sequence[RequestRecord]) -> Iterator[tuple[str, float | None]]:
    engine = [item.engine_ttft_s for item in completed if item.engine_ttft_s is not None]
    tpots = [item.tpot_s for item in completed]
    for name, values_s in (
        ("ttft", [item.ttft_s for item in completed]),
        ("engine_ttft", engine),
        ("tpot", [value for value in tpots if value is not None]),
        ("itl", [value for item in completed for value in item.itls_s]),
        ("e2el", [item.e2el_s for item in completed]),
    ):
        values_ms = 1000 * np.asarray(values_s)
        for statistic, value_of in _STATISTICS.items():
            found = float(value_of(values_ms)) if values_s else None
            yield f"{statistic}_{name}_ms", found


def _goodput(
    completed: Sequence[RequestRecord], bounds: Mapping[str, float] | None, duration_s: float
) -> float | None:
    """Good requests per second; ``None`` if nothing says which are good."""
    if not bounds:
        return None

    def is_good(record: RequestRecord) -> bool:
        times_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
        return all(1000 * times_s[name] <= bound for name, bound in bounds.items())

    return sum(map(is_good, completed)) / duration_s


def _peak_tokens_per_s(completed: Sequence[RequestRecord]) -> float:
    """Return the most tokens of any second; a request's tokens count as even over its chunks."""
    peak: dict[int, float] = {}
    for record in completed:
        seconds = Counter(int(time_s) for time_s in record.chunk_times_s)
        for second, count in seconds.items():
            share = count / len(record.chunk_times_s)
            peak[second] = peak.get(second, 0.0) + share * record.num_output_tokens
    return max(peak.values(), default=0.0)


def _peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of requests that were open at the same time."""
    changes = [(item.sent_s, 1) for item in records] + [(item.ended_s, -1) for item in records]
    num_open = peak = 0
    for _, change in sorted(changes):
        num_open += change
        peak = max(peak, num_open)
    return peak
