"""A replica that had to begin without the statistics database that another node has."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

import pytest
import ray

from actors import local_statistics, statistics_database
from actors.statistics_database import StatisticsClient
from deployments.replica import statistics
from deployments.replica.statistics import locate_statistics
from hdserve.databases.statistics import StatisticsDatabase
from tests.actors.statistics_directories import contents, held_elsewhere, lacking
from tests.deployments.large_statistics import write
from tests.deployments.late_statistics import FOUND, choosing, host_without
from tests.waiting import eventually


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_what_another_node_offers_later_is_fetched_and_drafted_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where this one was the first to start, or came while the actor was started again."""
    monkeypatch.setattr(statistics, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(statistics, "_MAX_RETRY_S", 0.05)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    caplog.set_level(logging.INFO)
    owned = tmp_path / "owned"
    with lacking(owned):
        host = host_without(tmp_path / "not here", locate_statistics)
        with choosing(host):
            time.sleep(0.2)
            StatisticsClient().offer(host.tokenizer.fingerprint, write(owned))
            eventually(lambda: host.statistics is not None)
    assert host.statistics is not None
    copy = host.statistics.directory
    assert copy is not None
    assert copy.parent == tmp_path / "hdserve-statistics"
    assert contents(copy) == contents(owned)
    assert caplog.text.count(f"{FOUND} {copy}") == 1
    ray.kill(statistics_database.get_or_create())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_what_another_process_takes_long_to_fetch_is_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica starts without it, and looks again."""
    monkeypatch.setattr(local_statistics, "_FETCHED_ELSEWHERE_S", 0.1)
    monkeypatch.setattr(statistics, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(statistics, "_MAX_RETRY_S", 0.05)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache, owned = tmp_path / "hdserve-statistics", write(tmp_path / "owned")
    fingerprint = StatisticsDatabase.open(owned).info.tokenizer
    StatisticsClient().offer(fingerprint, owned)
    with lacking(owned):
        with held_elsewhere(owned, fingerprint, cache):
            host = host_without(tmp_path / "not here", locate_statistics)
        with choosing(host):
            eventually(lambda: host.statistics is not None)
    assert host.statistics is not None
    assert host.statistics.directory is not None
    assert contents(host.statistics.directory) == contents(owned)
    ray.kill(statistics_database.get_or_create())
