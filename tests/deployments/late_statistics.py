"""Replicas that begin before their statistics database is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.replica.statistics import ChosenStatistics
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.host import LocateStatistics, ModelHost, first_directory
from tests.deployments.large_statistics import model_with

FOUND = "drafting from the statistics database"
"""What the log says once it is."""


def host_without(directory: Path, locate: LocateStatistics = first_directory) -> ModelHost:
    """Of a replica that begins before ``directory`` is there."""
    host = ModelHost(model_with(directory), locate_statistics=locate)
    assert host.statistics is None
    return host


@contextmanager
def choosing(host: ModelHost, root: Path | None = None) -> Iterator[ChosenStatistics]:
    """The statistics of a replica that runs."""
    engine = AsyncEngine(host.make_engine, 4)
    engine.start()
    chosen = ChosenStatistics(host, engine, root)
    chosen.start()
    try:
        yield chosen
    finally:
        chosen.close()
        engine.close()
