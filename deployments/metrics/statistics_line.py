"""One line for the log about a replica's recent work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from deployments.metrics.samples import HistogramValue, Sample


def statistics_line(before: Iterable[Sample], now: Iterable[Sample], elapsed_s: float) -> str:
    """Describe what happened between two reports; empty if nothing did.

    The mean acceptance length is ``1 + accepted / drafts``: the bonus token counts.
    """
    samples = list(now)
    gauges = {sample.name: sample.value for sample in samples if not sample.labels}
    change: defaultdict[str, float] = defaultdict(float)
    by_source: dict[str, float] = {}
    known = {(sample.name, sample.labels): sample.value for sample in before}
    for sample in samples:
        old = known.get((sample.name, sample.labels), 0)
        if isinstance(sample.value, HistogramValue) or isinstance(old, HistogramValue):
            continue
        change[sample.name] += sample.value - old
        if sample.name == "hdserve_accepted_tokens" and sample.value > old:
            by_source[sample.labels[0]] = sample.value - old
    if not change["vllm:prompt_tokens"] + change["vllm:generation_tokens"]:
        return ""
    parts = [
        f"prompt {change['vllm:prompt_tokens'] / elapsed_s:.1f} tokens/s",
        f"generation {change['vllm:generation_tokens'] / elapsed_s:.1f} tokens/s",
        f"running {gauges['vllm:num_requests_running']:.0f}",
        f"waiting {gauges['vllm:num_requests_waiting']:.0f}",
        f"KV cache {gauges['vllm:kv_cache_usage_perc']:.1%}",
    ]
    drafts = change["vllm:spec_decode_num_drafts"]
    if drafts:
        accepted = change["vllm:spec_decode_num_accepted_tokens"]
        drafted = change["vllm:spec_decode_num_draft_tokens"]
        sources = ", ".join(f"{source} {count:.0f}" for source, count in by_source.items())
        parts += [
            f"mean acceptance length {1 + accepted / drafts:.2f}",
            f"drafted {drafted:.0f}",
            f"accepted {accepted:.0f}" + (f" ({sources})" if sources else ""),
        ]
    return ", ".join(parts)
