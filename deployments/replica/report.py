"""The report of a model's replica."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from deployments.metrics.catalogue import LAST_POSITION
from deployments.metrics.samples import Histogram, Report, Sample, histogram_of
from deployments.replica.request_metrics import RequestMetrics
from deployments.replica.sharing import ClusterSharing
from hdserve.core import DraftCounts, FinishReason, Source
from hdserve.errors import EngineStopped

if TYPE_CHECKING:
    from deployments.replica.statistics import ChosenStatistics
    from hdserve.engine.async_engine import AsyncEngine
    from hdserve.engine.engine import Engine
    from hdserve.engine.host import ModelHost

_ENGINE_TIMEOUT_S = 1.0
_LOOKUP = "hdserve_lookup_seconds"
_DATABASE_SOURCES = (Source.CONTEXT, Source.MODEL, Source.STATISTICS)


class ReplicaMetrics:
    """Collects the counts of the engine, its databases, the mirror and the requests.

    Args:
        sharing: ``None`` if nothing is shared with the cluster.
        chosen: the statistics database in use.
    """

    def __init__(
        self,
        replica: str,
        host: ModelHost,
        engine: AsyncEngine,
        requests: RequestMetrics,
        sharing: ClusterSharing | None,
        chosen: ChosenStatistics,
    ) -> None:
        self._replica = replica
        self._host = host
        self._engine = engine
        self._requests = requests
        self._sharing = sharing
        self._chosen = chosen
        self._of_engine: tuple[Sample, ...] = ()
        self._lookups = {source: self._lookup(source) for source in _DATABASE_SOURCES}

    def _lookup(self, source: Source) -> Histogram:
        return Histogram(_LOOKUP, (source.label,), self._requests.observations)

    async def report(self) -> Report:
        """Return the current state; if the engine is in a long step, or has failed, its part is
        from its last answer."""
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                await self._engine.ask(self._note_engine)
        except (TimeoutError, EngineStopped):
            pass
        samples = (*self._of_engine, *self._requests.samples())
        databases = (*self._mirror_samples(), *self._statistics_samples())
        return Report(self._replica, (*samples, *databases))

    def _note_engine(self, engine: Engine) -> None:
        """Store the values of the engine and its databases.

        It runs in the engine's thread, which owns the databases, and so in order: readers ask from
        several threads, and none may see less than an earlier one.
        """
        samples = (*self._engine_samples(engine), *self._database_samples(engine))
        self._of_engine = (*samples, *self._lookup_samples(engine))

    def _lookup_samples(self, engine: Engine) -> Iterator[Sample]:
        for source, seconds in engine.lookup_times_s().items():
            if source not in self._lookups:
                self._lookups[source] = self._lookup(source)
            self._lookups[source].observe(seconds)
        for histogram in self._lookups.values():
            yield histogram.sample()

    def _engine_samples(self, engine: Engine) -> Iterator[Sample]:
        stats = engine.stats
        yield Sample("vllm:num_requests_running", stats.num_running)
        yield Sample("vllm:num_requests_waiting", stats.num_waiting)
        yield Sample("vllm:num_preemptions", stats.num_preemptions)
        yield Sample("vllm:kv_cache_usage_perc", stats.kv_cache_usage)
        yield Sample("vllm:prompt_tokens", stats.num_prompt_tokens)
        yield Sample("vllm:prefix_cache_queries", stats.num_queried_tokens)
        yield Sample("vllm:prefix_cache_hits", stats.num_reused_tokens)
        yield Sample("vllm:generation_tokens", stats.num_output_tokens)
        for reason in FinishReason:
            yield Sample("vllm:request_success", stats.num_finished.get(reason, 0), (reason,))
        yield Sample("hdserve_steps", stats.num_steps)
        for part, seconds in asdict(stats.times).items():
            yield Sample("hdserve_step_seconds", seconds, (part.removesuffix("_s"),))
        yield Sample("hdserve_slots", self._host.config.engine.max_num_sequences)
        yield Sample("hdserve_drafter_sequences", stats.num_drafter_sequences)
        yield Sample("hdserve_kv_cache_tokens", stats.num_kv_tokens)
        drafting = self._host.config.drafting
        most_drafted = drafting.most_draft_tokens(self._host.model.device.type)
        yield from draft_samples(stats.drafts, drafting.most_depth(most_drafted))
        yield histogram_of("hdserve_step_draft_tokens", stats.num_steps_by_draft_tokens)
        for (drafter, call), seconds in stats.drafter_times_s.items():
            yield Sample("hdserve_drafter_seconds", seconds, (drafter, call))
            num_failures = stats.num_drafter_failures.get((drafter, call), 0)
            yield Sample("hdserve_drafter_failures", num_failures, (drafter, call))
        yield Sample("hdserve_budget_proposed_tokens", stats.num_proposed_tokens)
        yield Sample("hdserve_budget_kept_tokens", stats.num_kept_tokens)

    def _database_samples(self, engine: Engine) -> Iterator[Sample]:
        databases = [*self._host.databases.values()]
        own, *others = databases
        found = [
            ("context", *engine.drafters.held()),
            ("model", own.num_entries, own.num_text_bytes),
            ("recycled", own.num_recycled_entries, own.num_recycled_bytes),
            ("calibration", *engine.drafters.learned()),
        ]
        if others:
            entries = sum(database.num_entries for database in others)
            found.append(("other_models", entries, sum(other.num_bytes for other in others)))
        statistics = self._host.statistics
        if statistics is not None:
            found.append(("statistics", statistics.info.num_contexts, statistics.rows.nbytes))
        for name, num_entries, num_bytes in found:
            yield Sample("hdserve_database_entries", num_entries, (name,))
            yield Sample("hdserve_database_bytes", num_bytes, (name,))
        for unit, count in (
            ("contexts", sum(database.num_given_up for database in databases)),
            ("namespaces", sum(database.num_dropped for database in databases)),
        ):
            yield Sample("hdserve_database_evictions", count, (unit,))

    def _mirror_samples(self) -> Iterator[Sample]:
        if self._sharing is None:
            return
        stats = self._sharing.stats()
        for direction, count in (
            ("published", stats.num_published_outputs),
            ("received", stats.num_received_outputs),
            ("skipped", self._sharing.num_skipped_outputs),
            ("dropped", stats.num_dropped_outputs),
            ("flushed", stats.num_flushed_outputs),
            ("refilled", stats.num_refilled_outputs),
        ):
            yield Sample("hdserve_mirror_outputs", count, (direction,))
        for reason, count in (
            ("actor_call_failed", stats.num_failures),
            ("not_taken", stats.num_receiver_failures),
            ("calibration_dropped", stats.num_dropped_calibrations),
        ):
            yield Sample("hdserve_database_fallbacks", count, (reason,))
        yield Sample("hdserve_mirror_queued_bytes", stats.num_queued_bytes)
        yield Sample("hdserve_mirror_age_seconds", stats.last_poll_age_s)
        yield Sample("hdserve_mirror_unwritten_actors", stats.num_unwritten_actors)

    def _statistics_samples(self) -> Iterator[Sample]:
        for reason, count in (
            ("statistics_unusable", self._chosen.num_unusable),
            ("statistics_choice_unknown", self._chosen.num_failures),
        ):
            yield Sample("hdserve_database_fallbacks", count, (reason,))


def draft_samples(drafts: DraftCounts, most_accepted: int) -> Iterator[Sample]:
    """Yield the counts of drafted and accepted tokens.

    Args:
        most_accepted: in one step; positions up to it exist from the start.
    """
    yield Sample("vllm:spec_decode_num_drafts", drafts.num_drafts)
    yield Sample("vllm:spec_decode_num_draft_tokens", drafts.num_draft_tokens)
    yield Sample("vllm:spec_decode_num_accepted_tokens", drafts.num_accepted_tokens)
    by_accepted = drafts.num_drafts_by_accepted
    num_positions = max(most_accepted, len(by_accepted) - 1)
    per_position = [sum(by_accepted[position + 1 :]) for position in range(num_positions)]
    for position, count in _positions(per_position):
        yield Sample("vllm:spec_decode_num_accepted_tokens_per_pos", count, (position,))
    for source in Source:
        if source is not Source.PLAIN:
            yield from _source_samples(drafts, source, num_positions)


def _source_samples(drafts: DraftCounts, source: Source, num_positions: int) -> Iterator[Sample]:
    for name, counts in (
        ("hdserve_drafts", drafts.drafts_by_source),
        ("hdserve_draft_tokens", drafts.draft_tokens_by_source),
        ("hdserve_accepted_tokens", drafts.accepted_by_source),
    ):
        yield Sample(name, counts.get(source, 0), (source.label,))
    by_depth = drafts.accepted_by_depth.get(source, [])
    per_position = by_depth + [0] * (num_positions - len(by_depth))
    for position, count in _positions(per_position):
        yield Sample("hdserve_accepted_tokens_per_pos", count, (source.label, position))


def _positions(counts: list[int]) -> Iterator[tuple[str, int]]:
    """Yield the label and the count of each position; from ``LAST_POSITION`` on they are one."""
    kept, deeper = counts[:LAST_POSITION], counts[LAST_POSITION:]
    if deeper:
        kept.append(sum(deeper))
    for position, count in enumerate(kept):
        yield str(position), count
