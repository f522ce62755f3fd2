"""What a replica passes to Ray's own metrics, up to its end."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.metrics import ray_metrics
from deployments.metrics.ray_metrics import RayExport, Reporter, ray_name
from deployments.metrics.samples import Observation, Observations, Report, Sample
from tests.waiting import WAIT_S

STEPS = "hdserve_steps"
SIZE = "hdserve_database_bytes"
LATENCY = "vllm:request_queue_time_seconds"


class Instruments:
    """Instead of Ray's.

    Attributes:
        counts: the sum of all increases, by metric.
        gauges: the last values, by metric and tag values.
        observed: single values, by metric.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.gauges: dict[tuple[str, ...], float] = {}
        self.observed: list[tuple[str, float]] = []

    def counter(self, name: str, **_: Any) -> Any:
        def inc(increase: float, tags: dict[str, str]) -> None:
            self.counts[name] += int(increase)

        return SimpleNamespace(inc=inc)

    def gauge(self, name: str, **_: Any) -> Any:
        def set_(value: float, tags: dict[str, str]) -> None:
            self.gauges[name, *tags.values()] = value

        return SimpleNamespace(set=set_)

    def histogram(self, name: str, **_: Any) -> Any:
        def observe(value: float, tags: dict[str, str]) -> None:
            self.observed.append((name, value))

        return SimpleNamespace(observe=observe)


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch) -> Instruments:
    """Which are exported to only when a reporter is closed."""
    made = Instruments()
    replaced = SimpleNamespace(Counter=made.counter, Gauge=made.gauge, Histogram=made.histogram)
    monkeypatch.setattr(ray_metrics, "ray_metrics", replaced)
    monkeypatch.setattr(ray_metrics, "EXPORT_INTERVAL_S", 10 * WAIT_S)
    monkeypatch.setattr(ray_metrics, "LAST_EXPORT_S", WAIT_S)
    return made


class Counting:
    """A replica that counts, and its reporter."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.observations = Observations()
        self.reporter = Reporter("m", {"model_name": "m"}, self.report, self.observations)

    async def report(self) -> Report:
        return Report("r", (Sample(STEPS, self.num_steps),))

    def count(self) -> None:
        self.num_steps += 3
        self.observations.add(Observation(LATENCY, 0.25))


def test_what_was_counted_last_is_exported(instruments: Instruments) -> None:
    """However soon after that the reporter is closed; a second time changes nothing."""
    replica = Counting()
    replica.reporter.start()
    replica.count()
    replica.reporter.close()
    replica.reporter.close()
    assert instruments.counts == {STEPS: 3}
    assert instruments.observed == [(ray_name(LATENCY), 0.25)]


def test_closing_before_the_start_waits_for_nothing(instruments: Instruments) -> None:
    Counting().reporter.close()
    assert not instruments.counts


def test_closing_does_not_wait_for_long(
    instruments: Instruments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that hangs is exported when it comes, if there still is a process."""
    monkeypatch.setattr(ray_metrics, "LAST_EXPORT_S", 0.01)
    released = threading.Event()

    async def report() -> Report:
        released.wait(WAIT_S)
        return Report("r", (Sample(STEPS, 1),))

    reporter = Reporter("m", {}, report, Observations())
    reporter.start()
    reporter.close()
    assert not instruments.counts
    released.set()
    monkeypatch.setattr(ray_metrics, "LAST_EXPORT_S", WAIT_S)
    reporter.close()
    assert instruments.counts == {STEPS: 1}


def test_the_thread_itself_may_close_it(
    instruments: Instruments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last reference to a replica may be there; what it reports then is exported."""
    monkeypatch.setattr(ray_metrics, "EXPORT_INTERVAL_S", 0.01)
    exported = threading.Event()

    class Closing(Counting):
        async def report(self) -> Report:
            self.reporter.close()
            exported.set()
            return Report("r", (Sample(STEPS, 1),))

    replica = Closing()
    replica.reporter.start()
    assert exported.wait(WAIT_S)
    replica.reporter.close()
    assert instruments.counts == {STEPS: 1}


def test_gauges_that_are_no_longer_reported_are_0(instruments: Instruments) -> None:
    """As of a statistics database that is no longer chosen, until it is again."""
    export = RayExport({"model_name": "m"})
    model, statistics = Sample(SIZE, 5, ("model",)), Sample(SIZE, 7, ("statistics",))
    found = []
    for samples in ((model, statistics), (model,), (model,), (model, statistics)):
        export.update(samples)
        found.append([instruments.gauges[SIZE, "m", each] for each in ("model", "statistics")])
    assert found == [[5, 7], [5, 0], [5, 0], [5, 7]]
