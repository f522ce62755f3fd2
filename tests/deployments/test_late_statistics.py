"""A replica that had to begin without the statistics database its configuration names."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from actors.statistics_database import StatisticsClient, StatisticsDatabaseActor
from deployments.replica import statistics
from deployments.replica.statistics import locate_statistics
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_info import TABLE_NAME
from hdserve.errors import DatabaseGone
from tests.deployments.large_statistics import write
from tests.deployments.late_statistics import FOUND, choosing, host_without
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(statistics, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(statistics, "_MAX_RETRY_S", 0.05)
    caplog.set_level(logging.INFO)


def test_one_of_this_node_that_comes_late_is_offered_too(
    tmp_path: Path,
    statistics_actor: StatisticsDatabaseActor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a volume that is mounted late; once it is used, nothing is looked for."""
    monkeypatch.setattr(statistics, "_OFFER_INTERVAL_S", 0.01)
    host = host_without(tmp_path / "late")
    with choosing(host):
        write(tmp_path / "late")
        eventually(lambda: bool(statistics_actor.catalogue(host.tokenizer.fingerprint)))
        eventually(lambda: host.statistics is not None)
        time.sleep(0.2)
    (offered,) = statistics_actor.catalogue(host.tokenizer.fingerprint)
    assert offered.directory == str(tmp_path / "late")
    assert caplog.text.count(FOUND) == 1


def test_what_is_found_late_takes_nothing_back_that_the_administrator_chose(
    tmp_path: Path, statistics_actor: StatisticsDatabaseActor, caplog: pytest.LogCaptureFixture
) -> None:
    """While it was fetched."""
    late, wanted = write(tmp_path / "late"), write(tmp_path / "wanted")
    keys = list[str]()

    def locate(_directories: Iterable[Path], _fingerprint: str) -> Path | None:
        if not keys:
            return None
        statistics_actor.choose(keys[0], "wanted")
        return late

    host = host_without(late, locate)
    with choosing(host, tmp_path) as chosen:
        keys.append(chosen._key)
        eventually(lambda: host.statistics is not None)
        time.sleep(0.2)
    assert host.statistics is not None
    assert host.statistics.directory == wanted
    assert caplog.text.count(FOUND) == 1


def test_one_of_this_node_is_found_while_nobody_can_say_what_was_chosen(
    tmp_path: Path,
    statistics_actor: StatisticsDatabaseActor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The actor is out of reach, which is said once; a choice is followed when it is back."""
    wanted = write(tmp_path / "wanted")
    host = host_without(tmp_path / "late")
    with monkeypatch.context() as unreachable, choosing(host, tmp_path) as chosen:
        unreachable.setattr(StatisticsClient, "_ask", unanswered)
        eventually(lambda: chosen.num_failures > 0)
        write(tmp_path / "late")
        eventually(lambda: host.statistics is not None)
        assert host.statistics.directory == tmp_path / "late"
        assert caplog.text.count("are not seen") == 1
        statistics_actor.choose(chosen._key, "wanted")
        unreachable.undo()
        eventually(lambda: host.statistics.directory == wanted)


def unanswered(*_: object) -> None:
    raise DatabaseGone("the statistics actor is out of reach")


def test_one_that_comes_late_and_is_damaged_is_not_drafted_from(
    tmp_path: Path, statistics_actor: StatisticsDatabaseActor, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is it offered, or looked for again and again."""
    host = host_without(tmp_path / "late")
    with choosing(host) as chosen:
        write(tmp_path / "being written", is_damaged=True).rename(tmp_path / "late")
        statistics_actor.register(host.tokenizer.fingerprint, str(tmp_path / "late"))
        eventually(lambda: chosen.num_unusable == 1)
        time.sleep(0.2)
    assert host.statistics is None
    assert chosen.num_unusable == 1
    assert statistics_actor.catalogue(host.tokenizer.fingerprint) == []
    assert caplog.text.count("drafting without statistics") == 1


def test_one_of_this_node_that_cannot_be_opened_is_not_taken_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody fetches it again: whoever opens it says what is wrong."""
    directory, fingerprint = write(tmp_path), StatisticsDatabase.open(tmp_path).info.tokenizer
    (directory / TABLE_NAME).write_bytes(b"")
    monkeypatch.setattr(statistics, "ensure_local", lambda *_, directories, **__: directories)
    assert locate_statistics([directory], fingerprint) == directory
    assert caplog.text == ""
