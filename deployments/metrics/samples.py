"""What a replica, of a model or of the gateway, reports: values of the catalogue's metrics.

A replica describes itself in a :class:`Report`.  The gateway renders the reports of all replicas as
text (:mod:`deployments.metrics.text`); :mod:`deployments.metrics.ray_metrics` passes the same
samples to Ray's own metrics port.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from deployments.metrics.catalogue import METRICS

_MAX_OBSERVATIONS = 20_000


class HistogramValue(NamedTuple):
    """Observations in buckets: ``counts`` has one entry more than the metric has bounds."""

    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """One series at one time; ``labels`` are the values of the metric's own labels."""

    name: str
    value: float | HistogramValue
    labels: tuple[str, ...] = ()


class Report(NamedTuple):
    """The report of one replica, of a model or of the gateway."""

    replica: str
    samples: tuple[Sample, ...]


class Observation(NamedTuple):
    """A value of a histogram."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Observations:
    """Single values on their way to Ray, whose histograms take no buckets; thread-safe.

    The oldest are dropped if nobody takes them.
    """

    def __init__(self) -> None:
        self._waiting: deque[Observation] = deque(maxlen=_MAX_OBSERVATIONS)

    def add(self, observation: Observation) -> None:
        """Add a value; if there are too many, the oldest is dropped."""
        self._waiting.append(observation)

    def take(self) -> Iterator[Observation]:
        """Take all values, the oldest first."""
        with suppress(IndexError):
            while True:
                yield self._waiting.popleft()


class Histogram:
    """Counts observations of one series; not thread-safe.

    Args:
        labels: the values of the metric's own labels.
        observations: gets every single value.
    """

    def __init__(
        self, name: str, labels: tuple[str, ...] = (), observations: Observations | None = None
    ) -> None:
        self._name = name
        self._labels = labels
        self._bounds = METRICS[name].bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._observations = observations

    def observe(self, value: float) -> None:
        """Count ``value``, in the metric's unit."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        if self._observations is not None:
            self._observations.add(Observation(self._name, value, self._labels))

    def sample(self) -> Sample:
        """Return all that was observed so far."""
        return Sample(self._name, HistogramValue(tuple(self._counts), self._total), self._labels)


def histogram_of(name: str, num_by_value: Iterable[int]) -> Sample:
    """Return a histogram of integers, given how often 0, 1, 2 and so on were observed."""
    bounds = METRICS[name].bounds
    counts, total = [0] * (len(bounds) + 1), 0
    for value, number in enumerate(num_by_value):
        counts[bisect_left(bounds, value)] += number
        total += value * number
    return Sample(name, HistogramValue(tuple(counts), total))
