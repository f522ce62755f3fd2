"""Plain counters of one engine; ``deployments/replica/report`` exports them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hdserve.core import DraftCounts, Source
from hdserve.tree import Acceptance, DraftTree


def count_draft(tree: DraftTree, acceptance: Acceptance, *counters: DraftCounts) -> None:
    """Add one verified tree to each of ``counters``; a tree without drafts only counts as a
    step."""
    drafted, num_accepted = tree.sources[1:], acceptance.num_accepted_tokens
    numbers = [(source, drafted.count(source)) for source in {*drafted}]
    accepted = [tree.sources[node] for node in acceptance.path[1:]]
    for counts in counters:
        counts.num_steps += 1
        if not drafted:
            continue
        counts.num_drafts += 1
        counts.num_draft_tokens += len(drafted)
        counts.num_accepted_tokens += num_accepted
        _add_at(counts.num_drafts_by_accepted, num_accepted, 1)
        for source, number in numbers:
            _increment(counts.draft_tokens_by_source, source, number)
            _increment(counts.drafts_by_source, source)
        for depth, source in enumerate(accepted):
            _add_at(counts.accepted_by_depth.setdefault(source, []), depth, 1)


def add_counts(total: DraftCounts, other: DraftCounts) -> None:
    """Add ``other`` to ``total``."""
    total.num_steps += other.num_steps
    total.num_drafts += other.num_drafts
    total.num_draft_tokens += other.num_draft_tokens
    total.num_accepted_tokens += other.num_accepted_tokens
    for source, count in other.draft_tokens_by_source.items():
        _increment(total.draft_tokens_by_source, source, count)
    for source, count in other.drafts_by_source.items():
        _increment(total.drafts_by_source, source, count)
    for source, by_depth in other.accepted_by_depth.items():
        own = total.accepted_by_depth.setdefault(source, [])
        for depth, count in enumerate(by_depth):
            _add_at(own, depth, count)
    for num_accepted, count in enumerate(other.num_drafts_by_accepted):
        _add_at(total.num_drafts_by_accepted, num_accepted, count)


def _increment(counts: dict[Source, int], source: Source, count: int = 1) -> None:
    counts[source] = counts.get(source, 0) + count


def _add_at(counts: list[int], index: int, count: int) -> None:
    if index >= len(counts):
        counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += count


@dataclass(slots=True)
class StepTimes:
    """Where the time of the steps went, seconds in total."""

    draft_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made, except for the gauges ``num_running``, ``num_waiting``,
    ``num_drafter_sequences`` (sequences with drafter state), ``kv_cache_usage`` (0 to 1) and
    ``num_kv_tokens``, the size of the cache.

    Attributes:
        num_queried_tokens: prompt tokens that were looked up in the KV cache.
        num_reused_tokens: those that were found.
        num_preemptions: how often a running sequence had to wait for room.
        num_drafter_failures, drafter_times_s: by drafter and call.
        num_proposed_tokens, num_kept_tokens: drafted tokens before and after the budget; those with
            too low a score are in neither.
        num_steps_by_draft_tokens: how often each number of tokens was drafted for a sequence.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_reused_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    times: StepTimes = field(default_factory=StepTimes)
    num_drafter_failures: dict[tuple[str, str], int] = field(default_factory=dict)
    drafter_times_s: dict[tuple[str, str], float] = field(default_factory=dict)
    num_proposed_tokens: int = 0
    num_kept_tokens: int = 0
    num_steps_by_draft_tokens: list[int] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    num_drafter_sequences: int = 0
    kv_cache_usage: float = 0.0
    num_kv_tokens: int = 0
