"""One trial: load, fault, recovery, and the record of what happened."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import ray

from tests.chaos.fault import Fault, Trial
from tests.chaos.load import Clients, Load, Outcome
from tests.chaos.questions import Question
from tests.chaos.system import System, key, wait_for

WARM_UP_ANSWERS = 12
WARM_UP_S = 90.0
RECOVERY_S = 300.0
AFTER_ANSWERS = 12
AFTER_S = 60.0
PUBLISH_S = 20.0
UNPUBLISHED_S = 1.0
"""What a killed replica may not have published yet: the publish interval and some scheduling."""


@dataclass(slots=True)
class Record:
    """What is written down of a trial.

    Attributes:
        num_wrong: answers with a token that plain decoding does not give.
        num_lost: requests that failed and had begun before the process concerned had ended.
        num_failed_later: requests that failed although they began after it.
        num_failed_at_last: of those, the ones that began after the recovery.
        num_unclear: of all that failed, those whose client got no error object; a stream that
            ends early is one of them.
        recovery_s: from the fault until everything was as before.
        longest_silence_s: between two right answers.
        num_outputs_lost: right answers from before the fault that the database lacks after it.
        outputs_lost_age_s: how long before the fault the oldest of them had ended.
        violations: what must not happen and did.
    """

    fault: str
    trial: int
    num_requests: int = 0
    num_right: int = 0
    num_refused: int = 0
    num_wrong: int = 0
    num_in_flight: int = 0
    num_lost: int = 0
    num_failed_later: int = 0
    num_failed_at_last: int = 0
    num_unclear: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    recovery_s: float | None = None
    longest_silence_s: float = 0.0
    num_outputs: int = 0
    num_outputs_lost: int = 0
    outputs_lost_age_s: float | None = None
    duration_s: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_trial(
    fault: Fault,
    number: int,
    system: System,
    questions: Sequence[Question],
    clients: Clients | None = None,
) -> Record:
    """Provoke ``fault`` once in ``system`` while clients ask ``questions``."""
    record = Record(fault.name, number)
    started_s = time.monotonic()
    first = number * 31 % (len(questions) - 1)
    questions = [*questions[first:-1], *questions[:first], questions[-1]]
    namespace = system.new_namespace()
    load = Load(system.base_url, key(namespace), questions, clients or Clients())
    trial = Trial(number, f"n{namespace}", system, load, questions)
    recovered_s = float("inf")
    load.start()
    try:
        trial.expect(_is_warm(load), "the load did not begin")
        at_s = time.monotonic()
        load.change_questions()
        record.num_in_flight = load.num_open()
        fault.inject(trial)
        if wait_for(lambda: fault.is_recovered(trial), RECOVERY_S):
            recovered_s = time.monotonic()
            record.recovery_s = round(recovered_s - max(at_s, trial.happened_s), 2)
            fault.check(trial)
            wanted = load.num_right() + AFTER_ANSWERS
            is_going_on = wait_for(lambda: load.num_right() >= wanted, AFTER_S)
            trial.expect(is_going_on, "too few answers after the recovery")
        else:
            trial.violations.append("no recovery")
    finally:
        load.stop()
    _count_outcomes(record, load.outcomes, max(at_s, trial.happened_s, trial.dead_s), recovered_s)
    _count_outputs(record, trial, at_s)
    _judge(record, fault, trial)
    record.details, record.violations = trial.details, trial.violations
    record.duration_s = round(time.monotonic() - started_s, 1)
    return record


def _is_warm(load: Load) -> bool:
    """Both replicas have answered, and there is something to lose."""
    return wait_for(
        lambda: load.num_right() >= WARM_UP_ANSWERS and len(load.replicas()) >= 2, WARM_UP_S
    )


def _count_outcomes(
    record: Record, outcomes: Sequence[Outcome], dead_s: float, recovered_s: float
) -> None:
    failed = [outcome for outcome in outcomes if outcome.is_failure]
    record.num_requests = len(outcomes)
    record.num_right = sum(outcome.kind == "right" for outcome in outcomes)
    record.num_refused = sum(outcome.kind == "refused" for outcome in outcomes)
    record.num_wrong = sum(outcome.kind == "wrong" for outcome in outcomes)
    record.num_lost = sum(outcome.started_s < dead_s for outcome in failed)
    record.num_failed_later = len(failed) - record.num_lost
    record.num_failed_at_last = sum(outcome.started_s > recovered_s for outcome in failed)
    record.num_unclear = sum(outcome.kind != "error" for outcome in failed)
    record.failures = dict(Counter(f"{outcome.kind}: {outcome.detail}" for outcome in failed))
    ends = sorted(outcome.ended_s for outcome in outcomes if outcome.kind == "right")
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    record.longest_silence_s = round(max(gaps, default=0.0), 2)


def _count_outputs(record: Record, trial: Trial, at_s: float) -> None:
    """Compare what was answered before the fault, and is not asked after it, with the database."""
    right = [outcome for outcome in trial.load.outcomes if outcome.kind == "right"]
    again = {outcome.question for outcome in right if outcome.ended_s >= at_s} | trial.asked_again
    ended_s = {
        outcome.question: outcome.ended_s for outcome in right if outcome.question not in again
    }
    missing = list(ended_s)

    def is_complete() -> bool:
        nonlocal missing
        try:
            missing = trial.missing_outputs(missing)
        except ray.exceptions.RayError:
            return False
        return not missing

    wait_for(is_complete, PUBLISH_S, 0.5)
    record.num_outputs, record.num_outputs_lost = len(ended_s), len(missing)
    if missing:
        record.outputs_lost_age_s = round(at_s - min(ended_s[index] for index in missing), 2)


def _judge(record: Record, fault: Fault, trial: Trial) -> None:
    trial.expect(not record.num_wrong, "a wrong token was delivered")
    num_later = record.num_failed_at_last if fault.may_refuse else record.num_failed_later
    trial.expect(not num_later, "requests failed that began after the fault")
    trial.expect(fault.may_lose_requests or not record.num_lost, "requests were lost")
    is_old = (record.outputs_lost_age_s or 0.0) > UNPUBLISHED_S
    may_lose = fault.may_lose_outputs and not is_old
    trial.expect(may_lose or not record.num_outputs_lost, "the database lost outputs")
