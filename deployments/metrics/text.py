"""Reports in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deployments.metrics.catalogue import METRICS, Kind, MetricInfo
from deployments.metrics.samples import HistogramValue, Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Mapping[Kind, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def render(models: Mapping[str, Iterable[Report]], gateways: Iterable[Report] = ()) -> bytes:
    """Return the text of the reports.

    Args:
        models: by model name, one report per replica.
    """
    families: dict[str, _Family] = {}
    owned = [((name, item.replica), item) for name, reports in models.items() for item in reports]
    for owner, report in [*owned, *(((item.replica,), item) for item in gateways)]:
        for sample in report.samples:
            info = METRICS[sample.name]
            if info.name not in families:
                labels = (*info.owner_labels, *info.labels)
                families[info.name] = _FAMILIES[info.kind](info.name, info.help, labels=labels)
            _add(families[info.name], info, (*owner, *sample.labels), sample.value)
    return generate_latest(_Families(families.values()))


def _add(
    family: _Family, info: MetricInfo, labels: tuple[str, ...], value: float | HistogramValue
) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, HistogramValue)
        buckets, num = [], 0
        ends = (*map(str, info.bounds), "+Inf")
        for end, count in zip(ends, value.counts, strict=True):
            num += count
            buckets.append((end, num))
        family.add_metric(labels, buckets, value.total)
    else:
        assert not isinstance(value, HistogramValue)
        family.add_metric(labels, value)


class _Families(Collector):
    """Passes finished families to ``generate_latest``."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
