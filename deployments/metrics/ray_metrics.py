"""A replica's samples on Ray's own metrics port, and one summary line in the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from ray.serve import metrics as ray_metrics

from deployments.metrics.catalogue import METRICS
from deployments.metrics.samples import HistogramValue, Observation, Observations, Report, Sample
from deployments.metrics.statistics_line import statistics_line

logger = logging.getLogger("ray.serve")
"""Serve's own logger, which writes to the log of the replica."""

EXPORT_INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
LAST_EXPORT_S = 0.5
"""How long the end of a process waits for what was counted last."""


def ray_name(name: str) -> str:
    """Return the name of a metric for Ray, which forbids colons and adds the prefix ``ray_``:
    ``vllm:x`` becomes ``hdserve_x``."""
    return name.replace("vllm:", "hdserve_")


class RayExport:
    """Passes the samples of one replica to ``ray.serve.metrics``, which adds its label.

    Ray's histograms take only single values, at about 10 us each.  Values observed once per request
    are passed one by one; for those observed in each step of each sequence, count and sum are
    exported as counters, and the buckets are in the gateway's ``/metrics``.

    On its port Ray computes a histogram's sum from the middles of its buckets, so the exact sum is
    a counter, ``..._exact_sum_total``.  Ray's counters take no 0: a series starts with its first
    increase.  Ray keeps showing a gauge, so that one that is no longer reported is set to 0.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._instruments: dict[str, Any] = {}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], Callable[[float], Any]] = {}
        """What sets each gauge of the last report."""

    def update(self, samples: Iterable[Sample]) -> None:
        """Export the increases of counters since the last time, and the values of gauges."""
        former, self._gauges = self._gauges, {}
        for sample in samples:
            info = METRICS[sample.name]
            tags = {**self._labels, **dict(zip(info.labels, sample.labels, strict=True))}
            name = ray_name(info.name)
            if isinstance(sample.value, HistogramValue):
                if info.is_per_step:
                    self._count(f"{name}_count", info.help, tags, sum(sample.value.counts))
                total = f"{name}_sum" if info.is_per_step else f"{name}_exact_sum"
                self._count(total, info.help, tags, sample.value.total)
            elif info.kind == "counter":
                self._count(name, info.help, tags, sample.value)
            else:
                self._set(name, info.help, tags, sample.value)
        for key in former.keys() - self._gauges.keys():
            former[key](0.0)

    def observe(self, observations: Iterable[Observation]) -> None:
        """Export single values."""
        for name, value, labels in observations:
            info = METRICS[name]
            tags = {**self._labels, **dict(zip(info.labels, labels, strict=True))}
            histogram = self._instrument(
                ray_metrics.Histogram, ray_name(name), info.help, tags, boundaries=list(info.bounds)
            )
            histogram.observe(value, tags)

    def _count(self, name: str, text: str, tags: dict[str, str], value: float) -> None:
        key = (name, tuple(tags.values()))
        increase = value - self._last.get(key, 0.0)
        if increase > 0:
            self._instrument(ray_metrics.Counter, name, text, tags).inc(increase, tags)
            self._last[key] = value

    def _set(self, name: str, text: str, tags: dict[str, str], value: float) -> None:
        set_to = partial(self._instrument(ray_metrics.Gauge, name, text, tags).set, tags=tags)
        set_to(value)
        self._gauges[name, tuple(tags.values())] = set_to

    def _instrument(
        self, kind: Any, name: str, text: str, tags: dict[str, str], **options: Any
    ) -> Any:
        if name not in self._instruments:
            self._instruments[name] = kind(name, description=text, tag_keys=tuple(tags), **options)
        return self._instruments[name]


class Reporter:
    """Exports the reports of a replica in a separate thread, and logs them now and then.

    Args:
        name: for the log.
        labels: identify the owner of the series, in addition to what Ray Serve adds.
        report: returns the newest report.
        observations: single values, which are taken from it.
    """

    def __init__(
        self,
        name: str,
        labels: dict[str, str],
        report: Callable[[], Awaitable[Report]],
        observations: Observations,
    ) -> None:
        self._name = name
        self._report = report
        self._observations = observations
        self._export = RayExport(labels)
        self._logged: tuple[Sample, ...] = ()
        self._logged_s = time.monotonic()
        self._num_failures = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Start exporting."""
        self._thread.start()

    def close(self) -> None:
        """Export what was counted last, and end; if that takes long, it is not waited for."""
        self._is_closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(LAST_EXPORT_S)

    def _run(self) -> None:
        asyncio.run(self._report_forever())

    async def _report_forever(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(EXPORT_INTERVAL_S)  # nothing else is in this loop
            try:
                samples = (await self._report()).samples
                self._export.update(samples)
                self._export.observe(self._observations.take())
                self._log(samples, time.monotonic())
            except Exception:  # requests are answered without metrics too
                if not self._num_failures:
                    logger.exception("%s: the metrics could not be exported", self._name)
                self._num_failures += 1

    def _log(self, samples: tuple[Sample, ...], now_s: float) -> None:
        elapsed_s = now_s - self._logged_s
        if elapsed_s < LINE_INTERVAL_S:
            return
        line = statistics_line(self._logged, samples, elapsed_s)
        if line:
            logger.info("%s: %s", self._name, line)
        self._logged, self._logged_s = samples, now_s
