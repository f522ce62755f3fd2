"""Databases are used where they are, and copied whole to nodes that lack them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from filelock import FileLock

from actors import local_statistics, statistics_database
from actors.local_statistics import ensure_local
from actors.statistics_database import StatisticsClient
from hdserve.errors import DatabaseGone
from tests.actors.statistics_directories import (
    NUM_BYTES,
    contents,
    held_elsewhere,
    lacking,
    make_database,
)
from tests.waiting import WAIT_S, eventually


def fetched(database: Path, fingerprint: str, cache: Path) -> list[Path]:
    """What another node has, which lacks the directory."""
    with lacking(database):
        return ensure_local(fingerprint, cache)


def offer(fingerprint: str, database: Path) -> None:
    """Offer a database, to the next actor where one was just killed."""

    def is_offered() -> bool:
        try:
            StatisticsClient().offer(fingerprint, database)
        except DatabaseGone:
            return False
        return True

    eventually(is_offered)


@pytest.fixture(scope="module")
def shared_actor(ray_cluster: None) -> Iterator[None]:
    """One for all; each test has a tokenizer of its own."""
    statistics_database.get_or_create()
    yield
    ray.kill(statistics_database.get_or_create())


@pytest.mark.ray
@pytest.mark.usefixtures("shared_actor")
class TestInRay:
    def test_a_node_that_has_the_directory_uses_it(self, database, fingerprint, tmp_path):
        cache = tmp_path / "cache"
        assert ensure_local(fingerprint, cache) == []
        assert ensure_local(fingerprint, cache, directories=[database]) == [database]
        assert ensure_local(fingerprint, cache) == [database]
        assert not cache.exists()

    def test_a_node_without_it_gets_a_checked_copy_once(self, database, fingerprint, tmp_path):
        actor = statistics_database.get_or_create()
        entry = ray.get(actor.register.remote(fingerprint, str(database)), timeout=WAIT_S)
        cache = tmp_path / "cache"

        @ray.remote(num_cpus=0.1)
        def fetch() -> list[Path]:
            return fetched(database, fingerprint, cache)

        copies = ray.get([fetch.remote() for _ in range(3)], timeout=WAIT_S)
        assert copies == [[cache / entry.database_id]] * 3
        assert contents(copies[0][0]) == contents(database)
        written = (copies[0][0] / "tables" / "order-2.bin").stat().st_mtime_ns
        assert fetched(database, fingerprint, cache) == copies[0]
        assert (copies[0][0] / "tables" / "order-2.bin").stat().st_mtime_ns == written
        assert [path.name for path in cache.iterdir() if path.is_dir()] == [entry.database_id]

    def test_a_copy_with_a_wrong_checksum_is_refused_and_removed(
        self, database, fingerprint, tmp_path, caplog
    ):
        actor = statistics_database.get_or_create()
        entry = ray.get(actor.register.remote(fingerprint, str(database)), timeout=WAIT_S)
        ray.get(actor.checksums.remote(entry.database_id), timeout=WAIT_S)
        path = database / "tables" / "order-2.bin"
        path.write_bytes(b"\0" * NUM_BYTES)
        cache = tmp_path / "cache"
        assert fetched(database, fingerprint, cache) == []
        assert "wrong checksum" in caplog.text
        assert [path for path in cache.iterdir() if path.is_dir()] == []

    def test_one_database_that_fails_does_not_take_the_others_along(
        self, database, fingerprint, tmp_path, caplog
    ):
        """One that was rebuilt in its place and not registered again."""
        other = make_database(tmp_path / "other", fingerprint, seed=1)
        cache, both = tmp_path / "cache", [database, other]
        assert ensure_local(fingerprint, cache, directories=both) == both
        (database / "empty.bin").write_bytes(b"x")
        assert ensure_local(fingerprint, cache) == [other]
        assert f"the statistics database {database} is not used" in caplog.text

    def test_what_is_asked_for_comes_before_what_is_larger(self, database, fingerprint, tmp_path):
        """Another model, or the configuration before, may have offered that."""
        larger, cache = make_database(tmp_path / "larger", fingerprint, seed=1), tmp_path / "cache"
        (larger / "more.bin").write_bytes(b"x")
        ensure_local(fingerprint, cache, directories=[database, larger])
        assert ensure_local(fingerprint, cache) == [larger]
        assert ensure_local(fingerprint, cache, wanted=[database]) == [database]
        with lacking(database):
            (copy,) = ensure_local(fingerprint, cache, wanted=[database])
        assert contents(copy) == contents(database)

    def test_a_database_that_was_rebuilt_in_its_place_is_fetched_by_other_nodes(
        self, database, fingerprint, tmp_path
    ):
        cache = tmp_path / "cache"
        assert ensure_local(fingerprint, cache, directories=[database]) == [database]
        (database / "empty.bin").write_bytes(b"x")
        assert ensure_local(fingerprint, cache, directories=[database]) == [database]
        (copy,) = fetched(database, fingerprint, cache)
        assert contents(copy) == contents(database)

    def test_a_damaged_copy_is_fetched_again(self, database, fingerprint, tmp_path):
        cache = tmp_path / "cache"
        ensure_local(fingerprint, cache, directories=[database])
        (copy,) = fetched(database, fingerprint, cache)
        (copy / "tables" / "order-2.bin").write_bytes(b"short")
        assert fetched(database, fingerprint, cache) == [copy]
        assert contents(copy) == contents(database)

    def test_copies_of_what_is_offered_no_longer_are_deleted(
        self, database, fingerprint, tmp_path, monkeypatch
    ):
        """Of this tokenizer, and nobody else's, by an actor that is not new."""
        monkeypatch.setattr(local_statistics, "OFFERED_FOR_S", 0.0)
        cache = tmp_path / "cache"
        others = make_database(cache / "others", "others")
        copies = []
        for seed in range(3):
            info = {"tokenizer": fingerprint, "seed": seed}
            (database / "info.json").write_text(json.dumps(info))
            ensure_local(fingerprint, cache, directories=[database])
            copies += fetched(database, fingerprint, cache)
        kept = [path for path in cache.iterdir() if path.is_dir()]
        assert sorted(kept) == sorted([others, copies[-1]])

    def test_what_a_killed_process_had_fetched_is_deleted(self, database, fingerprint, tmp_path):
        """Not what one that lives is fetching."""
        cache = tmp_path / "cache"
        left, fetched = cache / ".left.partial", cache / ".fetched.partial"
        for directory in (left, fetched):
            directory.mkdir(parents=True)
            (directory / "info.json").write_text("half")
        with FileLock(cache / "fetched.lock"):
            ensure_local(fingerprint, cache, directories=[database])
        assert not left.exists()
        assert fetched.exists()

    def test_what_another_process_takes_long_to_fetch_is_not_waited_for(
        self, database, fingerprint, tmp_path, monkeypatch, caplog
    ):
        """Nor is the next one taken, which would be used for good; a copy that is there is."""
        monkeypatch.setattr(local_statistics, "_FETCHED_ELSEWHERE_S", 0.2)
        smaller = make_database(tmp_path / "smaller", fingerprint, seed=1)
        (database / "more.bin").write_bytes(b"x")
        cache = tmp_path / "cache"
        ensure_local(fingerprint, cache, directories=[database, smaller])
        with held_elsewhere(database, fingerprint, cache):
            assert fetched(database, fingerprint, cache) == []
            assert f"the statistics database {database} is not used yet" in caplog.text
        copies = fetched(database, fingerprint, cache)
        with held_elsewhere(database, fingerprint, cache):
            assert fetched(database, fingerprint, cache) == copies
        assert contents(copies[0]) == contents(database)

    def test_a_copy_is_used_while_the_actor_knows_of_none(self, database, fingerprint, tmp_path):
        """After its restart, until somebody offers what he has again."""
        cache = tmp_path / "cache"
        ensure_local(fingerprint, cache, directories=[database])
        copies = fetched(database, fingerprint, cache)
        ray.kill(statistics_database.get_or_create())
        for _ in range(2):
            assert ensure_local(fingerprint, cache) == copies
        assert contents(copies[0]) == contents(database)
        assert ensure_local("another", cache) == []
        StatisticsClient().offer(fingerprint, database)
        assert ensure_local(fingerprint, cache) == [database]

    def test_a_copy_is_used_while_the_actor_may_know_of_others_only(
        self, database, fingerprint, tmp_path
    ):
        """After its restart, where another node with a smaller one is the first to offer."""
        smaller = make_database(tmp_path / "smaller", fingerprint, seed=1)
        (smaller / "tables" / "order-2.bin").write_bytes(b"small")
        cache = tmp_path / "cache"
        ensure_local(fingerprint, cache, directories=[database])
        copies = fetched(database, fingerprint, cache)
        ray.kill(statistics_database.get_or_create())
        offer(fingerprint, smaller)
        assert fetched(smaller, fingerprint, cache) == copies
        assert contents(copies[0]) == contents(database)
        StatisticsClient().offer(fingerprint, database)
        assert fetched(database, fingerprint, cache) == copies

    def test_a_node_finds_what_there_is_while_checksums_are_read(
        self, database, fingerprint, tmp_path
    ):
        """Of a database that takes an hour to read."""
        large = make_database(tmp_path / "large", "another")
        with (large / "tables" / "order-2.bin").open("r+b") as table:
            table.truncate(1 << 42)
        actor = statistics_database.get_or_create()
        entry = ray.get(actor.register.remote("another", str(large)), timeout=WAIT_S)
        cache = tmp_path / "cache"
        checksums = actor.checksums.remote(entry.database_id)
        try:
            assert ensure_local(fingerprint, cache, directories=[database]) == [database]
            assert ensure_local(fingerprint, cache) == [database]
            assert ray.wait([checksums], timeout=0)[0] == []
        finally:
            ray.kill(actor)  # it would read on

    def test_it_works_again_after_the_actor_was_killed(self, database, fingerprint, tmp_path):
        cache = tmp_path / "cache"
        assert ensure_local(fingerprint, cache, directories=[database]) == [database]
        ray.kill(statistics_database.get_or_create(), no_restart=False)
        assert ensure_local(fingerprint, cache, directories=[database]) == [database]
        (copy,) = fetched(database, fingerprint, cache)
        assert contents(copy) == contents(database)

    def test_errors_are_short_and_name_the_cause(self, database, fingerprint, tmp_path, caplog):
        cache = tmp_path / "file"
        cache.write_text("")
        ensure_local(fingerprint, cache, directories=[database])
        assert fetched(database, fingerprint, cache) == []
        (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert str(cache) in record.getMessage()
        assert "Traceback" not in record.getMessage()
