"""Sends requests at a rate and a concurrency, and collects the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np

from hdserve.bench.openai_client import OpenAIClient
from hdserve.bench.request_record import RequestRecord
from hdserve.prompts import PromptRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """When requests are sent.

    Attributes:
        concurrency: most requests at a time.
        num_prompts: how many requests.
        request_rate: mean arrivals a second, from which times then count, though a request may wait
            until fewer than ``concurrency`` run; infinite sends as fast as ``concurrency`` allows.
        burstiness: shape of the Gamma-distributed gaps between arrivals: 1 is a Poisson process,
            less is burstier, more is steadier.
        seed: of the gaps, of the order of the prompts and, plus the number of the request, of the
            sampling.
        num_before: requests of earlier plans: this one continues in the order of the prompts.
        num_asked: how many, from the first, were sent before it was interrupted.
    """

    concurrency: int
    num_prompts: int
    request_rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0
    num_before: int = 0
    num_asked: int = 0

    def num_repeated(self, rows: Sequence[PromptRow]) -> int:
        """Return how many requests repeat a prompt that this plan or an earlier one has already
        sent: a server may draft from the answer."""
        sent = replace(self, num_before=0, num_prompts=self.num_before + self.num_asked)
        asked = {repr(row.messages) for row in arrange(rows, sent)}
        num_before = len(asked)
        asked |= {repr(row.messages) for row in arrange(rows, self)}
        return self.num_prompts - (len(asked) - num_before)


@dataclass(slots=True)
class Load:
    """The results of a plan.

    Attributes:
        records: of the requests that ended, in the order in which they did.
        duration_s: from the first request to the end of the last.
        is_interrupted: whether it was stopped before the end; requests that were running then are
            not counted.
        num_repeated: see :meth:`LoadPlan.num_repeated`.
        num_asked: requests that were sent.
    """

    plan: LoadPlan
    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    is_interrupted: bool = False
    num_repeated: int = 0
    num_asked: int = 0


def arrange(rows: Sequence[PromptRow], plan: LoadPlan) -> list[PromptRow]:
    """Return the prompts in the order in which they are sent, starting over when they run
    out."""
    order = np.random.default_rng(plan.seed).permutation(len(rows))
    asked = islice(cycle(order.tolist()), plan.num_before, plan.num_before + plan.num_prompts)
    return [rows[index] for index in asked]


def arrivals_s(plan: LoadPlan) -> list[float]:
    """Return the seconds from the start to each request."""
    if np.isinf(plan.request_rate):
        return [0.0] * plan.num_prompts
    scale_s = 1.0 / (plan.request_rate * plan.burstiness)
    gaps_s = np.random.default_rng(plan.seed).gamma(plan.burstiness, scale_s, plan.num_prompts)
    times_s: list[float] = np.cumsum(gaps_s).tolist()
    return times_s


async def run_load(
    client: OpenAIClient,
    rows: Sequence[PromptRow],
    plan: LoadPlan,
    *,
    stop: asyncio.Event,
    progress: Callable[[RequestRecord], None],
) -> Load:
    """Carry out ``plan`` until its end, or until ``stop`` is set.

    Args:
        progress: called with every request that ended.
    """
    load = Load(plan, num_repeated=plan.num_repeated(rows))
    places = asyncio.Semaphore(plan.concurrency)
    started_s = time.monotonic()

    async def send(number: int, row: PromptRow, at_s: float) -> None:
        await asyncio.sleep(started_s + at_s - time.monotonic())
        async with places:
            load.num_asked = max(load.num_asked, number + 1)
            record = await client.ask(
                row.name, row.conversation or row.text, seed=plan.seed + number
            )
            if np.isfinite(plan.request_rate):
                record.started_s = started_s + at_s
            load.records.append(record)
        progress(record)

    async def send_all() -> bool:
        async with asyncio.TaskGroup() as group:
            for item in _numbered(rows, plan):
                group.create_task(send(*item))
        return True

    load.is_interrupted = not await until_stopped(stop, send_all())
    load.duration_s = time.monotonic() - started_s
    return load


async def until_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``; if ``stop`` is set first, ``work`` is cancelled and the result
    is ``None``."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    both: set[asyncio.Task[Any]] = {working, stopping}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        is_done = working.done()
    finally:
        for task in both:
            task.cancel()
        await asyncio.wait(both)
    return working.result() if is_done else None


def _numbered(rows: Sequence[PromptRow], plan: LoadPlan) -> Iterator[tuple[int, PromptRow, float]]:
    for number, (row, at_s) in enumerate(zip(arrange(rows, plan), arrivals_s(plan), strict=True)):
        yield number, row, at_s
