"""How a gateway gets the reports of all replicas."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.exceptions import RayServeException

from deployments.metrics.catalogue import METRICS
from deployments.metrics.samples import Report, Sample
from deployments.metrics.text import render

logger = logging.getLogger(__name__)

KEEP_S = 300.0

_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Heard:
    report: Report
    at_s: float


class ReportBook:
    """The last report of each replica of one deployment.

    The counts of a replica are kept for ``KEEP_S`` after its last report, so that a reader's next
    scrape finds its last counts, and no sum over replicas falls before that.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def hear(self, reports: Iterable[Report], now_s: float) -> None:
        """Store these reports as the latest of their replicas, and forget replicas whose last
        report is too old."""
        for report in reports:
            self._heard[report.replica] = _Heard(report, now_s)
        self.forget_before(now_s - KEEP_S)

    def forget_before(self, at_s: float) -> None:
        """Forget the replicas whose last report is from before this time."""
        for replica in [key for key, item in self._heard.items() if item.at_s < at_s]:
            del self._heard[replica]

    def reports(self, since_s: float) -> list[Report]:
        """Return the reports received since this time, and only the counters of older ones."""
        return [
            item.report if item.at_s >= since_s else _without_gauges(item.report)
            for item in self._heard.values()
        ]


class MetricsPoll:
    """Asks all replicas when somebody asks it, one round at a time.

    Whoever asks during a round gets the results of the next one, together with all others who wait
    for it, so that every reader sees everything counted before it asked: a load client takes the
    difference of two readings, even within a second, as the effect of its requests.

    With several gateways nothing is kept of replicas that are gone: each gateway heard them last at
    another time, and for a reader that visits them in turn counters would fall, as in a restart.

    Args:
        handles: by model name.
        gateways: of all gateways, including this one.
    """

    def __init__(self, handles: Mapping[str, Any], gateways: Any) -> None:
        self._handles = dict(handles)
        self._gateways = gateways
        self._num_gateways = 1
        self._books: defaultdict[str, ReportBook] = defaultdict(ReportBook)
        self._gateway_book = ReportBook()
        self._lock = asyncio.Lock()
        self._polled_s = -math.inf

    async def text(self) -> bytes:
        """Return the reports of all as Prometheus text."""
        asked_s = time.monotonic()
        async with self._lock:
            if self._polled_s < asked_s:
                await self._poll_all()
            models = {name: book.reports(self._polled_s) for name, book in self._books.items()}
            gateways = self._gateway_book.reports(self._polled_s)
        return await asyncio.to_thread(render, models, gateways)  # some ms per replica

    async def _poll_all(self) -> None:
        started_s = time.monotonic()
        polls = [_poll(handle, self._books[name]) for name, handle in self._handles.items()]
        found, *_ = await asyncio.gather(_poll(self._gateways, self._gateway_book), *polls)
        self._num_gateways = found or self._num_gateways
        if self._num_gateways > 1:
            for book in (self._gateway_book, *self._books.values()):
                book.forget_before(started_s)
        self._polled_s = started_s  # not reached if the round was cancelled


async def _poll(handle: Any, book: ReportBook) -> int:
    """Collect the reports of all replicas behind ``handle``, except of those that fail or do not
    answer.  Return how many replicas there are; 0 if that is not known.

    Ray Serve's ``results_async`` returns nothing of the others if one does not answer.
    """
    end_s = asyncio.get_running_loop().time() + _TIMEOUT_S
    replicas: list[Any] = []
    try:
        async with asyncio.timeout_at(end_s):
            replicas = await handle.broadcast("report")._fetch_replica_results_async()
    except (TimeoutError, RayServeException) as error:
        logger.debug("no metrics: %s", error)
    waiting = (_answer(replica, end_s) for replica in replicas)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    book.hear((item for item in answers if isinstance(item, Report)), time.monotonic())
    return len(replicas)


async def _answer(replica: Any, end_s: float) -> Any:
    async with asyncio.timeout_at(end_s):
        return await replica.get_async()


def _without_gauges(report: Report) -> Report:
    def is_kept(sample: Sample) -> bool:
        return METRICS[sample.name].kind != "gauge"

    return Report(report.replica, tuple(filter(is_kept, report.samples)))
