"""Replay recorded outputs through the drafters that serve, without a model.

The target model is the recording: a step yields the longest path of the draft tree that the
recorded response follows, and one bonus token.  The first token of a response comes from prefill.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from hdserve.bench.replay_files import ReplayRow
from hdserve.core import SamplingParams, Source
from hdserve.core import Sequence as RequestSequence
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import Drafter
from hdserve.tree import Acceptance, DraftTree

SETTLING_STEPS = 2000
"""So many steps the scores of a new model have to settle."""


class ReplayMode(StrEnum):
    """What the cross-request databases hold: ``cold`` clears them before each request, ``online``
    starts empty and keeps, ``warm`` starts from the fill files and keeps."""

    COLD = "cold"
    ONLINE = "online"
    WARM = "warm"


@dataclass(slots=True)
class ReplayResult:
    """The counts of one replay."""

    num_requests: int = 0
    num_tokens: int = 0
    """Response tokens but the first of each, which prefill decides."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    expected_tokens: float = 0.0
    """Sum of the node scores: how many drafted tokens the drafters thought would be accepted."""

    settled_expected_tokens: float = 0.0
    settled_accepted_tokens: int = 0
    """The same and what was accepted, after the first ``SETTLING_STEPS``."""

    database_bytes: int = 0
    tokens_by_task: Counter[str] = field(default_factory=Counter)
    steps_by_task: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    draft_s: list[float] = field(default_factory=list)
    observe_s_per_token: list[float] = field(default_factory=list)
    start_s_per_token: list[float] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_tokens / max(1, self.num_steps)

    @property
    def mean_draft_tokens(self) -> float:
        return self.num_draft_tokens / max(1, self.num_steps)

    @property
    def score_calibration(self) -> float:
        """Expected over accepted draft tokens; 1 is perfectly calibrated."""
        return self.expected_tokens / max(1, self.accepted_by_source.total())

    @property
    def settled_score_calibration(self) -> float | None:
        """The same after ``SETTLING_STEPS`` steps; ``None`` when there are not as many."""
        if self.num_steps <= SETTLING_STEPS:
            return None
        return self.settled_expected_tokens / max(1, self.settled_accepted_tokens)

    def count_step(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count a verified tree and its accepted nodes."""
        expected = sum(tree.scores) - 1.0
        self.num_steps += 1
        self.num_draft_tokens += tree.num_draft_tokens
        self.expected_tokens += expected
        self.accepted_by_source.update(tree.sources[node] for node in accepted)
        if self.num_steps > SETTLING_STEPS:
            self.settled_expected_tokens += expected
            self.settled_accepted_tokens += len(accepted)

    def by_task(self) -> dict[str, float]:
        """Mean acceptance length of each task."""
        return {
            task: tokens / max(1, self.steps_by_task[task])
            for task, tokens in sorted(self.tokens_by_task.items())
        }

    def as_json(self) -> dict[str, Any]:
        """The figures; latencies in microseconds."""
        return {
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "steps": self.num_steps,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "mean_acceptance_length_by_task": {k: round(v, 4) for k, v in self.by_task().items()},
            "mean_draft_tokens": round(self.mean_draft_tokens, 3),
            "accepted_by_source": {s.label: n for s, n in sorted(self.accepted_by_source.items())},
            "score_calibration": round(self.score_calibration, 4),
            "settled_score_calibration": _rounded(self.settled_score_calibration),
            "draft_latency_us": _percentiles(self.draft_s),
            "observe_latency_us": _percentiles(self.observe_s_per_token),
            "start_latency_us_per_prompt_token": _percentiles(self.start_s_per_token),
            "database_bytes": self.database_bytes,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(np.array(seconds) * 1e6, (50, 99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


class Replay:
    """Replays requests, one after another or some at a time.

    Args:
        drafters: fill the tree in order.
        model_database: cleared, kept or filled by the mode; outputs enter it when they end, and
            as they are said while others run, as far as the drafters do so.
        budget: most drafted tokens of a request and step.
        concurrency: requests that take their steps in turn.
    """

    def __init__(
        self,
        drafters: Iterable[Drafter],
        model_database: ModelDatabase,
        mode: ReplayMode,
        budget: int,
        max_depth: int,
        concurrency: int = 1,
    ) -> None:
        self._drafters = tuple(drafters)
        self._database = model_database
        self._mode = mode
        self._budget = budget
        self._max_depth = max_depth
        self._concurrency = concurrency
        self.result = ReplayResult()

    def fill(self, rows: Iterable[ReplayRow]) -> None:
        """Record finished requests before the replay, as serving would have."""
        for row in rows:
            seq = _sequence(row)
            seq.token_ids += row.response
            self._database.record(seq)

    def run(self, rows: Iterable[ReplayRow], on_row: Callable[[], None] | None = None) -> None:
        """Replay ``rows`` and add to ``result``."""
        waiting = deque(rows)
        running: deque[tuple[RequestSequence, ReplayRow]] = deque()
        while waiting or running:
            if waiting and len(running) < self._concurrency:
                row = waiting.popleft()
                running.append((self._start(row), row))
                continue
            seq, row = running.popleft()
            if seq.num_output_tokens < len(row.response):
                self._step(seq, row)
                running.append((seq, row))
                continue
            self._finish(seq, row)
            if on_row:
                on_row()

    def _start(self, row: ReplayRow) -> RequestSequence:
        if self._mode is ReplayMode.COLD:
            self._database.clear()
        seq = _sequence(row)
        begin = time.perf_counter()
        for drafter in self._drafters:
            drafter.start(seq)
        elapsed = time.perf_counter() - begin
        self.result.start_s_per_token.append(elapsed / max(1, len(row.prompt)))
        first = DraftTree(seq.token_ids[-1] if seq.token_ids else 0, 0)
        if row.response:
            self._observe(seq, first, Acceptance((0,), row.response[:1]))
        return seq

    def _finish(self, seq: RequestSequence, row: ReplayRow) -> None:
        for drafter in self._drafters:
            drafter.finish(seq)
        if not row.response:
            return
        self._database.record(seq)
        result = self.result
        result.num_requests += 1
        result.num_tokens += len(row.response) - 1
        result.tokens_by_task[row.task] += len(row.response) - 1
        result.database_bytes = max(result.database_bytes, self._database.num_bytes)

    def _step(self, seq: RequestSequence, row: ReplayRow) -> None:
        result = self.result
        tree = DraftTree(seq.token_ids[-1], self._budget, self._max_depth)
        begin = time.perf_counter()
        for drafter in self._drafters:
            drafter.propose(seq, tree)
        result.draft_s.append(time.perf_counter() - begin)
        acceptance = verify_recorded(tree, row.response[seq.num_output_tokens :])
        result.count_step(tree, acceptance.path[1:])
        result.steps_by_task[row.task] += 1
        elapsed = self._observe(seq, tree, acceptance)
        result.observe_s_per_token.append(elapsed / len(acceptance.token_ids))

    def _observe(self, seq: RequestSequence, tree: DraftTree, acceptance: Acceptance) -> float:
        seq.token_ids += acceptance.token_ids
        begin = time.perf_counter()
        for drafter in self._drafters:
            drafter.observe(seq, tree, acceptance, None)
        return time.perf_counter() - begin


def verify_recorded(tree: DraftTree, remaining: Sequence[int]) -> Acceptance:
    """The acceptance of a tree by a model that will say ``remaining`` (not empty).

    The bonus token is left out when the recording ends with an accepted token.
    """
    children: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for node in range(1, len(tree)):
        children[tree.parents[node]][tree.token_ids[node]] = node
    path, chosen = [0], []
    for token_id in remaining:
        chosen.append(token_id)
        child = children[path[-1]].get(token_id)
        if child is None or len(chosen) == len(remaining):
            if child is not None:
                path.append(child)
            break
        path.append(child)
    return Acceptance(tuple(path), tuple(chosen))


def _sequence(row: ReplayRow) -> RequestSequence:
    seq = RequestSequence(row.name, list(row.prompt), SamplingParams(temperature=0.0))
    seq.max_total_tokens = len(row.prompt) + len(row.response)
    return seq
