"""What replicas report to several readers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.metrics.poll import MetricsPoll
from deployments.metrics.samples import Report, Sample
from deployments.replica.report import ReplicaMetrics
from deployments.replica.request_metrics import RequestMetrics
from hdserve.errors import EngineStopped


class BusyEngine:
    """Answers at once; whoever asked hears of it when ``heard`` says so."""

    def __init__(self) -> None:
        self.heard: list[asyncio.Event] = []
        self.has_failed = False

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        if self.has_failed:
            raise EngineStopped("it has failed")
        answer = question(SimpleNamespace(lookup_times_s=dict))
        self.heard.append(asyncio.Event())
        await self.heard[-1].wait()
        return answer


class StepMetrics(ReplicaMetrics):
    """Of an engine that makes a step between two questions."""

    def __init__(self, engine: Any) -> None:
        chosen: Any = SimpleNamespace(num_unusable=0, num_failures=0)
        host: Any = None
        super().__init__("r", host, engine, RequestMetrics(), None, chosen)
        self._num_steps = 0

    def _engine_samples(self, engine: Any) -> Iterator[Sample]:
        self._num_steps += 1
        yield Sample("hdserve_steps", self._num_steps)

    def _database_samples(self, engine: Any) -> Iterator[Sample]:
        yield from ()


def num_steps(report: Report) -> Any:
    return next(sample.value for sample in report.samples if sample.name == "hdserve_steps")


def test_no_counter_falls_when_an_answer_is_heard_late() -> None:
    """Gateways and Ray's exporter ask from threads of their own.  To Prometheus a counter that
    falls has begun anew, and all it had counted is added once more."""

    async def reports() -> tuple[Report, Report]:
        engine = BusyEngine()
        metrics = StepMetrics(engine)
        asked = [asyncio.create_task(metrics.report()) for _ in range(2)]
        while len(engine.heard) < 2:
            await asyncio.sleep(0)
        engine.heard[1].set()
        newer = await asked[1]
        engine.heard[0].set()
        await asked[0]
        engine.has_failed = True
        return newer, await metrics.report()

    newer, last = asyncio.run(reports())
    assert num_steps(newer) == num_steps(last) == 2


class Replicas:
    """Of a model or of the gateway, asked through a handle of Ray Serve.

    Args:
        num_tokens: what each reports, if anything; ``None``: that there is none.
    """

    def __init__(self, num_tokens: int | None = None, num: int = 1) -> None:
        self.num_tokens = num_tokens
        self.num = num
        self.num_asked = 0

    def broadcast(self, _method: str) -> Replicas:
        self.num_asked += 1
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        return [] if self.num_tokens is None else [self] * self.num

    async def get_async(self) -> Report:
        found = (Sample("vllm:prompt_tokens", self.num_tokens),) if self.num_tokens else ()
        return Report("r", found)


@pytest.mark.parametrize(("num_gateways", "kept"), [(1, [[b"5.0"], [b"9.0"]]), (2, [[], []])])
def test_no_counter_falls_from_one_gateway_to_the_next(
    num_gateways: int, kept: list[list[bytes]]
) -> None:
    """Of a replica that is gone each has heard at another time: so nothing is kept of it while
    there are several, whatever the configuration says."""

    async def visits() -> list[bytes]:
        replicas, gateways = Replicas(5), Replicas(0, num_gateways)
        one, other = (MetricsPoll({"m": replicas}, gateways) for _ in range(2))
        texts = [await one.text()]
        replicas.num_tokens = 9
        texts.append(await other.text())
        replicas.num_tokens = None
        return [*texts, await one.text(), await other.text()]

    lines = [
        re.findall(rb"^vllm:prompt_tokens_total.* (.*)$", text, re.M)
        for text in asyncio.run(visits())
    ]
    assert lines == [[b"5.0"], [b"9.0"], *kept]


def test_readers_have_what_was_counted_before_they_asked() -> None:
    """One after the other, however soon; those who come while replicas are asked share a time."""

    async def visits() -> list[bytes]:
        replicas = Replicas(5)
        poll = MetricsPoll({"m": replicas}, Replicas(0))
        texts = [await poll.text()]
        replicas.num_tokens = 7
        texts.append(await poll.text())
        replicas.num_tokens = 9
        texts += await asyncio.gather(*(poll.text() for _ in range(20)))
        assert replicas.num_asked == 2 + 2
        return texts

    counts = [
        int(float(line.rsplit(b" ", 1)[1]))
        for text in asyncio.run(visits())
        for line in re.findall(rb"^vllm:prompt_tokens_total.*$", text, re.M)
    ]
    assert counts == [5, 7, *[9] * 20]
