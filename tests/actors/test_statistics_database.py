"""Databases are offered by their content, and handed out file by file; the last choice counts."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import statistics_database
from actors.local_statistics import ensure_local
from actors.statistics_database import Choice, StatisticsClient, StatisticsDatabaseActor
from actors.statistics_files import describe, file_checksum
from hdserve.databases.statistics_builder import StatisticsBuilder
from hdserve.databases.statistics_info import MAX_CORPORA, MAX_LICENCES
from hdserve.errors import DatabaseError, DatabaseGone
from tests.actors.statistics_directories import NUM_BYTES, contents, make_database
from tests.waiting import WAIT_S


def chosen(actor: StatisticsDatabaseActor, directory: str) -> Choice:
    """What replicas hear of a choice."""
    actor.choose("m", directory)
    found = actor.choice("m")
    assert found is not None
    return found


def test_a_build_that_is_under_way_changes_no_database(database: Path) -> None:
    """A replica that starts meanwhile drafts from what is there, and no node copies more."""
    before = describe(database)
    for name in ("unfinished/info.json", "unfinished.new/table.partial", "table.partial"):
        (database / name).parent.mkdir(exist_ok=True)
        (database / name).write_bytes(b"not yet")
    assert describe(database) == before
    assert "tables/order-2.bin" in before.sizes


def test_a_table_that_was_replaced_is_not_copied(tmp_path: Path) -> None:
    """It stays for the replicas that have mapped it, and no node needs both."""
    builder = StatisticsBuilder("t", 100, max_bytes=1 << 20)
    found = []
    for text in ([5, 6, 7], [8, 9]):
        builder.add("corpus", text)
        found.append((builder.write(tmp_path).table, describe(tmp_path)))
    (first, before), (second, after) = found
    assert (set(before.sizes), set(after.sizes)) == ({"info.json", first}, {"info.json", second})
    assert (tmp_path / first).exists()
    assert before.database_id != after.database_id


def test_as_many_long_names_as_may_be_are_a_database(tmp_path: Path) -> None:
    """Also where each character is written as six."""
    builder = StatisticsBuilder("t", 100, max_bytes=1 << 20)
    for number in range(MAX_CORPORA + 5):
        for licence in range(MAX_LICENCES + 1):
            name = f"{number} {licence}" + 128 * "\1"
            builder.add(f"{number}" + 128 * "\1", [5, 6], licence=name)
    builder.write(tmp_path)
    assert (tmp_path / "info.json").stat().st_size > 5 << 20
    assert describe(tmp_path).fingerprint == "t"
    with (tmp_path / "info.json").open("ab") as file:
        file.write(bytes(3 << 20))
    with pytest.raises(DatabaseError, match="is larger than"):
        describe(tmp_path)


def test_choices() -> None:
    """The last one counts; what a replica knows counts where the actor has forgotten."""
    actor = StatisticsDatabaseActor()
    assert actor.choice("m") is None
    first = chosen(actor, "a")
    assert first.directory == "a"
    again = chosen(actor, "a")
    assert again != first
    assert actor.choice("m", first) == again
    assert actor.choice("other") is None
    restarted = StatisticsDatabaseActor()
    assert restarted.choice("m", again) == again


def test_a_restart_takes_no_choice_back() -> None:
    """Though a replica that has not heard of it asks first, or a clock goes back."""
    actor = StatisticsDatabaseActor()
    first, second = chosen(actor, "a"), chosen(actor, "b")
    restarted = StatisticsDatabaseActor()
    assert restarted.choice("m", first) == first
    assert restarted.choice("m", second) == second
    assert restarted.choice("m", first) == second
    ahead = second._replace(order=10**20)
    assert restarted.choice("m", ahead) == ahead
    last = chosen(restarted, "c")
    assert last.directory == "c"
    assert restarted.choice("m", ahead) == last


def test_a_later_choice_counts_though_the_clock_was_set_back(monkeypatch) -> None:
    first = StatisticsDatabaseActor()
    old = chosen(first, "old")
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    second = StatisticsDatabaseActor()
    chosen(second, "new")
    for _ in range(2):
        new = second.choice("m", old)
        assert new is not None
        assert new.directory == "new"
    third = StatisticsDatabaseActor()
    for reminder in (new, old, new):
        assert third.choice("m", reminder) == new


def test_what_nobody_offers_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is left out once another database of the tokenizer is offered, until it is offered again."""
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    old, new, other = (
        str(make_database(tmp_path / name, fingerprint, seed=seed))
        for seed, (name, fingerprint) in enumerate([("old", "f"), ("new", "f"), ("other", "g")])
    )
    actor = StatisticsDatabaseActor()

    def offered(*directories: str) -> list[str]:
        for directory in directories:
            actor.register("g" if directory == other else "f", directory)
        return [database.directory for database in actor.catalogue("f")]

    assert offered(old, other) == [old]
    now_s += 10_000
    assert offered(other) == [old]
    assert offered(new) == [new]
    assert offered(old) == [old, new]
    now_s += 599
    assert offered(new) == [old, new]
    now_s += 1
    assert offered(new) == [new]


@pytest.mark.ray
def test_calls_leave_nothing_in_the_process(ray_cluster: None) -> None:
    """A replica asks every second, for months."""
    client = StatisticsClient()
    ray.get(statistics_database.get_or_create().age_s.remote(), timeout=WAIT_S)
    client.choice("m", None)
    before = len(ray.actor._ActorClassMethodMetadata._cache)
    for _ in range(5):
        client.choice("m", None)
    assert len(ray.actor._ActorClassMethodMetadata._cache) == before
    ray.kill(statistics_database.get_or_create())


def test_a_database_is_described_by_its_content_not_its_place(tmp_path):
    database = make_database(tmp_path / "database", "f")
    copy = make_database(tmp_path / "copy", "f")
    other = make_database(tmp_path / "other", "f", seed=1)
    another = make_database(tmp_path / "another", "g")
    here = describe(database)
    assert here.sizes == {"empty.bin": 0, "info.json": 51, "tables/order-2.bin": NUM_BYTES}
    assert here.fingerprint == "f"
    assert describe(copy).database_id == here.database_id
    assert describe(another).database_id != here.database_id
    assert describe(other).database_id != here.database_id


@pytest.mark.parametrize("description", [None, "no json", "[1, 2]", "\xff", " " * 2**21])
def test_what_is_no_statistics_database_is_refused(tmp_path, description):
    if description is not None:
        (tmp_path / "info.json").write_text(description, encoding="latin-1")
    with pytest.raises(DatabaseError, match=str(tmp_path)):
        describe(tmp_path)


def test_the_catalogue_lists_each_database_of_a_tokenizer_once(database, fingerprint, tmp_path):
    other = make_database(tmp_path / "other", fingerprint, seed=1)
    actor = StatisticsDatabaseActor()
    for directory in (database, other, database):
        actor.register(fingerprint, str(directory))
    assert [item.directory for item in actor.catalogue(fingerprint)] == [str(database), str(other)]
    assert actor.catalogue("g") == []
    with pytest.raises(DatabaseError, match="not a statistics database"):
        actor.register(fingerprint, str(tmp_path / "none"))


def test_a_database_of_another_tokenizer_is_not_offered(database, tmp_path):
    """Replicas that have none of their own would fetch it and could not draft from it."""
    actor = StatisticsDatabaseActor()
    with pytest.raises(DatabaseError, match="another tokenizer"):
        actor.register("another", str(database))
    assert actor.catalogue("another") == []
    with pytest.raises(DatabaseError, match="another tokenizer"):
        ensure_local("another", tmp_path, directories=[database])


def test_only_registered_files_are_handed_out(database, fingerprint):
    actor = StatisticsDatabaseActor()
    database_id = actor.register(fingerprint, str(database)).database_id
    chunk = actor.read_chunk(database_id, "info.json", 5)
    assert bytes(chunk) == contents(database)["info.json"][5:]
    for name in ("../secret", "/etc/passwd", "tables"):
        with pytest.raises(DatabaseError, match="has no file"):
            actor.read_chunk(database_id, name, 0)
    with pytest.raises(DatabaseError, match="no statistics database unknown"):
        actor.read_chunk("unknown", "info.json", 0)


def test_a_database_that_changed_is_not_handed_out(database, fingerprint):
    actor = StatisticsDatabaseActor()
    database_id = actor.register(fingerprint, str(database)).database_id
    (database / "empty.bin").write_bytes(b"x")
    with pytest.raises(DatabaseError, match="has changed"):
        actor.checksums(database_id)


def test_checksums_are_not_those_of_what_was_withdrawn_while_they_were_read(
    database: Path, fingerprint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was damaged, in whose place is another of the same description and size."""
    actor = StatisticsDatabaseActor()
    database_id = actor.register(fingerprint, str(database)).database_id
    before = file_checksum(database / "tables" / "order-2.bin")

    def read_slowly(path: Path) -> str:
        checksum = file_checksum(path)
        if path.name == "order-2.bin":
            path.write_bytes(bytes(NUM_BYTES))
            actor.withdraw(str(database))
            actor.register(fingerprint, str(database))
        return checksum

    with monkeypatch.context() as patch:
        patch.setattr(statistics_database, "file_checksum", read_slowly)
        assert actor.checksums(database_id)["tables/order-2.bin"] == before
    after = file_checksum(database / "tables" / "order-2.bin")
    assert actor.checksums(database_id)["tables/order-2.bin"] == after != before


def test_an_actor_knows_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says whether all have had the time to offer what they have."""
    actor = StatisticsDatabaseActor()
    now_s = time.monotonic()
    assert 0 <= actor.age_s() < 60
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 3600)
    assert actor.age_s() >= 3600


def test_a_directory_is_offered_as_it_was_registered_last(database, fingerprint):
    actor = StatisticsDatabaseActor()
    before = actor.register(fingerprint, str(database))
    actor.checksums(before.database_id)
    (database / "empty.bin").write_bytes(b"x")
    after = actor.register(fingerprint, str(database))
    assert actor.catalogue(fingerprint) == [after]
    assert actor.checksums(after.database_id).keys() == after.sizes.keys()
    with pytest.raises(DatabaseError, match="no statistics database"):
        actor.checksums(before.database_id)


@pytest.mark.ray
def test_a_call_that_took_too_long_is_withdrawn(holder_and_waiting: tuple[Any, Any]) -> None:
    """While no node has room for the actor, questions do not pile up that are asked again."""
    holder, waiting = holder_and_waiting
    for _ in range(3):
        with pytest.raises(DatabaseGone, match="did not answer: tell"):
            statistics_database.call(waiting, "tell", b"early", timeout_s=0.1)
    after = waiting.told.remote()
    ray.kill(holder)
    assert ray.get(after, timeout=WAIT_S) == []
