"""The counts of a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hdserve.core import Source

SETTLING_STEPS = 2000
"""After this many steps the scores of a new model have settled."""


class ReplayStep(NamedTuple):
    """The record of one step: enough to count it again, and to repeat what was decided."""

    num_tokens: int
    """Tokens decided, the bonus token included."""

    num_draft_tokens: int
    expected_tokens: float
    """Sum of the scores of the drafted nodes."""

    sources: tuple[int, ...]
    """The sources of the accepted nodes."""

    draft_s: float
    observe_s: float


@dataclass(slots=True)
class ReplayResult:
    """The counts of one replay."""

    num_requests: int = 0
    num_tokens: int = 0
    """Response tokens except the first of each, which prefill decides."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    expected_tokens: float = 0.0
    """Sum of the node scores: how many drafted tokens the drafters expected to be accepted."""

    settled_expected_tokens: float = 0.0
    settled_accepted_tokens: int = 0
    """The sum of the node scores and the number accepted, after the first ``SETTLING_STEPS``."""

    database_bytes: int = 0
    tokens_by_task: Counter[str] = field(default_factory=Counter)
    steps_by_task: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    draft_s: list[float] = field(default_factory=list)
    observe_s_per_token: list[float] = field(default_factory=list)
    start_s_per_token: list[float] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, the bonus token included."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def mean_draft_tokens(self) -> float:
        """Drafted tokens per step."""
        return self.num_draft_tokens / max(1, self.num_steps)

    @property
    def score_calibration(self) -> float:
        """Expected over accepted draft tokens; 1 is perfectly calibrated."""
        return self.expected_tokens / max(1, self.accepted_by_source.total())

    @property
    def settled_score_calibration(self) -> float | None:
        """Expected over accepted draft tokens after ``SETTLING_STEPS`` steps; ``None`` if there are
        fewer."""
        if self.num_steps <= SETTLING_STEPS:
            return None
        return self.settled_expected_tokens / max(1, self.settled_accepted_tokens)

    def count_step(self, task: str, step: ReplayStep) -> None:
        """Count a verified tree and its accepted nodes."""
        self.num_steps += 1
        self.steps_by_task[task] += 1
        self.num_draft_tokens += step.num_draft_tokens
        self.expected_tokens += step.expected_tokens
        self.accepted_by_source.update(map(Source, step.sources))
        self.draft_s.append(step.draft_s)
        self.observe_s_per_token.append(step.observe_s / step.num_tokens)
        if self.num_steps > SETTLING_STEPS:
            self.settled_expected_tokens += step.expected_tokens
            self.settled_accepted_tokens += len(step.sources)

    def by_task(self) -> dict[str, float]:
        """Return the mean acceptance length of each task."""
        return {
            task: tokens / max(1, self.steps_by_task[task])
            for task, tokens in sorted(self.tokens_by_task.items())
        }

    def as_json(self) -> dict[str, Any]:
        """Return the figures; latencies in microseconds."""
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
            "draft_latency_us": percentiles_us(self.draft_s),
            "observe_latency_us": percentiles_us(self.observe_s_per_token),
            "start_latency_us_per_prompt_token": percentiles_us(self.start_s_per_token),
            "database_bytes": self.database_bytes,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in microseconds; 0 without any times."""
    if not seconds:
        return {"p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(np.array(seconds) * 1e6, (50, 99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}
