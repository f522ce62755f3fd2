"""``hdserve bench engine``: contenders interleaved over several rounds, and their ratios."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from hdserve.bench.contenders import Contender, Measurement, Run
from hdserve.bench.task import Decoding, Task
from hdserve.bench.task_names import ALL_TASKS
from hdserve.core import DraftCounts
from hdserve.engine.stats import StepTimes, add_counts
from hdserve.journal import Journal

BASELINE = "autoregressive"


@dataclass(frozen=True, slots=True)
class Result:
    """One row: a contender at one batch size on one task, or on ``all`` together.

    Attributes:
        tokens_per_s: median over the rounds.
        ratio_to_autoregressive: median over the rounds of the ratio within a round.
        ratio_low, ratio_high: 95 % interval of that median over the rounds (order statistics of
            the sign test); the extremes when there are fewer than six rounds.
        mean_acceptance_length: tokens per forward of a sequence, the bonus token included.
            Forwards without drafts count, unlike in the API.
        mean_draft_tokens: drafted tokens per forward of a sequence.
        step_ms: the time of one step by part.
        peak_memory_bytes: of the device, else of the process, while the contender decoded; it
            includes the engines and databases of all contenders.
        most_waiting: most sequences of the batch that waited at the same time, for room in the KV
            cache or for a prompt that begins alike.
    """

    contender: str
    batch_size: int
    temperature: float
    task: str
    tokens_per_s: float
    ratio_to_autoregressive: float | None
    ratio_low: float | None
    ratio_high: float | None
    mean_acceptance_length: float
    mean_draft_tokens: float
    accepted_by_source: dict[str, int]
    step_ms: dict[str, float]
    peak_memory_bytes: int
    most_waiting: int
    num_rounds: int


Runs = dict[tuple[str, str], list[Measurement]]
"""The measurements by contender and task, one per round."""

_Round = list[tuple[str, str, Measurement]]
"""Contender, task, and what was measured."""

_ROUND: TypeAdapter[_Round] = TypeAdapter(_Round)


def filling(tasks: Sequence[Task], batch_size: int) -> list[Task]:
    """Return ``tasks`` so that they can fill a batch: unchanged, or all of them together, in turn,
    if one of several has fewer prompts than the batch has sequences."""
    if len(tasks) == 1 or min(len(task.prompts) for task in tasks) >= batch_size:
        return list(tasks)
    most = max(len(task.prompts) for task in tasks)
    turns = [(task, index) for index in range(most) for task in tasks if index < len(task.prompts)]
    recorded = [task.recorded[index] for task, index in turns if task.recorded is not None]
    return [Task(ALL_TASKS, [task.prompts[index] for task, index in turns], recorded or None)]


def run_rounds(
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    decoding: Decoding,
    *,
    num_rounds: int,
    journal: Journal | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Runs:
    """Decode every task with every contender, ``num_rounds`` times; at batch sizes that a task
    cannot fill, all tasks together.

    Contenders take turns of a fraction of a second, so that other work on the machine affects all
    of them, and in another order each round.

    Args:
        journal: where rounds are kept and restored from.  A round is kept as a whole, since its
            ratios are from one process.  It starts with the shipped calibration, so that no round
            knows the prompts from the round before.
        progress: called after each run, including restored ones.
    """
    journal = journal or Journal(None, {})
    tasks = filling(tasks, decoding.batch_size)
    able = [contender for contender in contenders if contender.is_able(decoding.batch_size)]

    def decode(round_number: int) -> Any:
        shift = round_number % len(able)
        order = able[shift:] + able[:shift]
        runs = _run_round(order, tasks, decoding, progress)
        return _ROUND.dump_python(runs, mode="json")

    runs: Runs = defaultdict(list)
    for round_number in range(num_rounds):
        unit = f"batch {decoding.batch_size}, round {round_number}"
        is_restored = unit in journal
        found = _ROUND.validate_python(journal.once(unit, partial(decode, round_number)))
        for name, task, measured in found:
            runs[name, task].append(measured)
            if is_restored:
                progress()
    return runs


def _run_round(
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    decoding: Decoding,
    progress: Callable[[], None],
) -> _Round:
    for contender in contenders:
        contender.begin_round()
    runs: _Round = []
    for task in tasks:
        with ExitStack() as stack:
            started = {
                contender.name: stack.enter_context(closing(contender.run(task, decoding)))
                for contender in contenders
            }
            for name, measured in _take_turns(started):
                runs.append((name, task.name, measured))
                progress()
    return runs


def _take_turns(runs: Mapping[str, Run]) -> Iterator[tuple[str, Measurement]]:
    """Always continue the run with the least share of its tokens done, so that all end at about the
    same time, and yield the measurement of each that has ended."""
    shares = dict.fromkeys(runs, 0.0)
    while shares:
        name = min(shares, key=shares.__getitem__)
        try:
            shares[name] = next(runs[name])
        except StopIteration as ended:
            del shares[name]
            yield name, ended.value


def summarise(runs: Runs, decoding: Decoding) -> Iterator[Result]:
    """Yield the rows of such runs: every task, then all of them together."""
    names = list(dict.fromkeys(name for name, _ in runs))
    tasks = list(dict.fromkeys(task for _, task in runs))
    combined = dict(runs)
    for name in names:
        rounds = zip(*(runs[name, task] for task in tasks), strict=True)
        combined[name, ALL_TASKS] = [_sum(measurements) for measurements in rounds]
    for task in (*(tasks if len(tasks) > 1 else ()), ALL_TASKS):
        for name in names:
            baseline = combined.get((BASELINE, task))
            yield _result(name, task, combined[name, task], baseline, decoding)


def _result(
    name: str,
    task: str,
    measured: Sequence[Measurement],
    baseline: Sequence[Measurement] | None,
    decoding: Decoding,
) -> Result:
    total = _sum(measured)
    ratios = [
        _speed(one) / _speed(other) for one, other in zip(measured, baseline or (), strict=False)
    ]
    low, high = median_interval(ratios) if ratios else (None, None)
    num_steps = max(total.num_steps, 1)
    times = total.times
    parts = {
        "draft": times.draft_s,
        "forward": times.forward_s,
        "verify": times.verify_s,
        "rest": total.seconds - times.draft_s - times.forward_s - times.verify_s,
    }
    return Result(
        contender=name,
        batch_size=decoding.batch_size,
        temperature=decoding.temperature,
        task=task,
        tokens_per_s=statistics.median(map(_speed, measured)),
        ratio_to_autoregressive=statistics.median(ratios) if ratios else None,
        ratio_low=low,
        ratio_high=high,
        mean_acceptance_length=total.num_tokens / num_steps,
        mean_draft_tokens=total.drafts.num_draft_tokens / num_steps,
        accepted_by_source={
            source.label: count for source, count in sorted(total.drafts.accepted_by_source.items())
        },
        step_ms={
            part: 1e3 * seconds / max(total.num_engine_steps, 1) for part, seconds in parts.items()
        },
        peak_memory_bytes=total.peak_memory_bytes,
        most_waiting=total.most_waiting,
        num_rounds=len(measured),
    )


def has_interval(num_rounds: int) -> bool:
    """Return whether the extremes of ``num_rounds`` rounds form a 95 % interval of their median, or
    a wider one."""
    return 2 * 0.5**num_rounds <= 0.05


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median from order statistics (the sign test); the extremes if
    there are too few values."""
    ordered = sorted(values)
    n = len(ordered)
    tail, rank, probability = 0.0, 0, 0.5**n
    while tail + probability <= 0.025:
        tail += probability
        rank += 1
        probability *= (n - rank + 1) / rank
    index = max(rank - 1, 0)
    return ordered[index], ordered[n - 1 - index]


def _speed(measured: Measurement) -> float:
    return measured.num_tokens / measured.seconds


def _sum(measurements: Sequence[Measurement]) -> Measurement:
    drafts, times = DraftCounts(), StepTimes()
    for one in measurements:
        add_counts(drafts, one.drafts)
        times.draft_s += one.times.draft_s
        times.forward_s += one.times.forward_s
        times.verify_s += one.times.verify_s
    return Measurement(
        seconds=sum(one.seconds for one in measurements),
        num_tokens=sum(one.num_tokens for one in measurements),
        num_steps=sum(one.num_steps for one in measurements),
        drafts=drafts,
        times=times,
        num_engine_steps=sum(one.num_engine_steps for one in measurements),
        peak_memory_bytes=max(one.peak_memory_bytes for one in measurements),
        most_waiting=max(one.most_waiting for one in measurements),
    )
