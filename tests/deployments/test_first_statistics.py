"""The statistics database a replica begins with is drafted from at once, and read to its end."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.statistics_database import StatisticsDatabaseActor
from deployments.replica import statistics
from deployments.replica.statistics import ChosenStatistics
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.databases.statistics_info import INFO_NAME, TABLE_NAME
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.host import ModelHost
from tests.deployments.large_statistics import MODEL, model_with, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of the database."""
    return tmp_path


@pytest.fixture
def host(directory: Path, request: pytest.FixtureRequest) -> ModelHost:
    write(directory, is_damaged=request.param)
    return ModelHost(model_with(directory))


@pytest.fixture
def engine(host: ModelHost) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(host.make_engine, 4)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def actor(
    statistics_actor: StatisticsDatabaseActor, monkeypatch: pytest.MonkeyPatch
) -> StatisticsDatabaseActor:
    """Asked as often as it can be."""
    monkeypatch.setattr(statistics, "_POLL_INTERVAL_S", 0.01)
    return statistics_actor


@pytest.mark.parametrize("host", [True], ids=["damaged"], indirect=True)
@pytest.mark.usefixtures("actor")
def test_a_damaged_one_is_given_up(
    directory: Path, host: ModelHost, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    assert host.statistics is not None, "only the ends are checked when it is opened"
    with caplog.at_level(logging.ERROR):
        chosen = ChosenStatistics(host, engine, None)
        chosen.start()
        deadline_s = time.monotonic() + 60
        while host.statistics is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert host.statistics is None
    assert chosen.num_unusable == 1
    assert directory.is_dir(), "what an administrator put there is not deleted"
    assert f"{MODEL}: drafting without statistics" in caplog.text
    chosen.close()


@pytest.mark.parametrize("host", [True], ids=["damaged"], indirect=True)
def test_one_that_was_given_up_is_not_offered_again(
    host: ModelHost, engine: AsyncEngine, actor: StatisticsDatabaseActor
) -> None:
    """Other nodes would fetch it, to give it up as well; nor is it any longer, as from where the
    replica found it."""
    assert host.statistics is not None
    actor.register(host.tokenizer.fingerprint, str(host.statistics.directory))
    chosen = ChosenStatistics(host, engine, None)
    chosen._check_first()
    assert actor.catalogue(host.tokenizer.fingerprint) == []
    chosen._offer()
    assert actor.catalogue(host.tokenizer.fingerprint) == []


@pytest.mark.parametrize("host", [True], ids=["damaged"], indirect=True)
def test_a_damaged_copy_is_fetched_again_next_time(
    directory: Path, host: ModelHost, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    copy = directory / "hdserve-statistics" / "copy"
    copy.mkdir(parents=True)
    for name in (INFO_NAME, TABLE_NAME):
        (directory / name).rename(copy / name)
    host.statistics = StatisticsDatabase.open(copy)
    chosen = ChosenStatistics(host, engine, None)
    chosen._check_first()
    assert chosen.num_unusable == 1
    assert not copy.exists()


@pytest.mark.parametrize("host", [False], ids=["right"], indirect=True)
def test_a_right_one_stays(
    host: ModelHost, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all of it was read."""
    found, read, verify = host.statistics, list[StatisticsDatabase](), StatisticsDatabase.verify

    def noted(database: StatisticsDatabase) -> None:
        verify(database)
        read.append(database)

    monkeypatch.setattr(StatisticsDatabase, "verify", noted)
    chosen = ChosenStatistics(host, engine, None)
    chosen._check_first()
    asyncio.run(engine.ask(lambda engine: engine.stats))
    assert [database is found for database in read] == [True]
    assert host.statistics is found
    assert chosen.num_unusable == 0


@pytest.mark.parametrize("host", [False], ids=["right"], indirect=True)
def test_one_that_is_chosen_before_it_is_there_is_taken_when_it_is(
    directory: Path,
    host: ModelHost,
    engine: AsyncEngine,
    actor: StatisticsDatabaseActor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a node whose volume is late; it is said once."""
    chosen = ChosenStatistics(host, engine, directory.parent)
    actor.choose(chosen._key, "late")
    wanted = directory.with_name("late")
    for _ in range(3):
        chosen._follow()
        time.sleep(0.05)
    shutil.copytree(directory, wanted)
    deadline_s = time.monotonic() + 60
    while host.statistics.directory != wanted and time.monotonic() < deadline_s:
        chosen._follow()
        time.sleep(0.01)
    assert host.statistics.directory == wanted
    assert chosen.num_unusable == 1
    assert caplog.text.count("the chosen statistics database") == 1


@pytest.mark.parametrize("host", [False], ids=["right"], indirect=True)
def test_one_of_this_node_is_offered_to_an_actor_that_forgot_it(
    directory: Path,
    host: ModelHost,
    engine: AsyncEngine,
    actor: StatisticsDatabaseActor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "_OFFER_INTERVAL_S", 0.01)
    chosen = ChosenStatistics(host, engine, None)
    chosen.start()
    deadline_s = time.monotonic() + 60
    while not actor.catalogue(host.tokenizer.fingerprint) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    chosen.close()
    (found,) = actor.catalogue(host.tokenizer.fingerprint)
    assert found.directory == str(directory)
