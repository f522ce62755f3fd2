"""Corpora are found, used where they are, and copied whole to nodes that lack them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import ray
from filelock import FileLock

from actors import statistics_database
from actors.corpus import describe
from actors.statistics_database import CHUNK_BYTES, Choice, StatisticsDatabaseActor, ensure_local
from hdserve.errors import DatabaseError

NUM_BYTES = CHUNK_BYTES + 12_345


@pytest.fixture
def fingerprint() -> str:
    return uuid4().hex


@pytest.fixture
def corpus(tmp_path: Path, fingerprint: str) -> Path:
    return make_corpus(tmp_path / "corpus", fingerprint)


def make_corpus(directory: Path, fingerprint: str, seed: int = 0) -> Path:
    (directory / "tables").mkdir(parents=True)
    info = {"name": "a corpus", "tokenizer": fingerprint, "seed": seed}
    (directory / "info.json").write_text(json.dumps(info))
    values = np.random.default_rng(seed).integers(0, 256, NUM_BYTES, np.uint8)
    values.tofile(directory / "tables" / "order-2.bin")
    (directory / "empty.bin").write_bytes(b"")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def chosen(actor: StatisticsDatabaseActor, directory: str) -> Choice:
    """What replicas hear of a choice."""
    actor.choose("m", Choice(directory, uuid4().hex))
    found = actor.choice("m")
    assert found is not None
    return found


def test_a_build_that_is_under_way_changes_no_corpus(corpus: Path, fingerprint: str) -> None:
    """A replica that starts meanwhile drafts from what is there, and no node copies more."""
    before = describe(fingerprint, corpus)
    for name in ("unfinished/info.json", "unfinished.new/table.partial", "table.partial"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_bytes(b"not yet")
    assert describe(fingerprint, corpus) == before
    assert "tables/order-2.bin" in before.sizes


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
    ahead = second._replace(number=f"{10**20}.ahead")
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


def test_choices_of_an_earlier_version() -> None:
    """Their numbers say nothing of an order: they count where nothing else is known, and as any
    other when they are chosen."""
    old, older = Choice("a", uuid4().hex), Choice("b", uuid4().hex)
    actor = StatisticsDatabaseActor()
    assert actor.choice("m", old) == old
    assert actor.choice("m", older) == old
    known = chosen(StatisticsDatabaseActor(), "c")
    assert actor.choice("m", known) == known
    assert actor.choice("m", old) == known
    assert chosen(actor, "d").directory == "d"
    found = actor.choice("m", known)
    assert found is not None
    assert found.directory == "d"


def test_a_corpus_is_described_by_its_content_not_its_place(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", "f")
    copy = make_corpus(tmp_path / "copy", "f")
    other = make_corpus(tmp_path / "other", "f", seed=1)
    here = describe("f", corpus)
    assert here.sizes == {"empty.bin": 0, "info.json": 49, "tables/order-2.bin": NUM_BYTES}
    assert here.info["name"] == "a corpus"
    assert describe("f", copy).corpus_id == here.corpus_id
    assert describe("g", corpus).corpus_id != here.corpus_id
    assert describe("f", other).corpus_id != here.corpus_id


@pytest.mark.parametrize("description", [None, "no json", "[1, 2]", "\xff", " " * 2**21])
def test_what_is_no_statistics_database_is_refused(tmp_path, description):
    if description is not None:
        (tmp_path / "info.json").write_text(description, encoding="latin-1")
    with pytest.raises(DatabaseError, match=str(tmp_path)):
        describe("f", tmp_path)


def test_the_catalogue_lists_each_corpus_of_a_tokenizer_once(corpus, fingerprint, tmp_path):
    other = make_corpus(tmp_path / "other", fingerprint, seed=1)
    actor = StatisticsDatabaseActor()
    for directory in (corpus, other, corpus):
        actor.register(fingerprint, str(directory))
    assert [item.directory for item in actor.catalogue(fingerprint)] == [str(corpus), str(other)]
    assert actor.catalogue("g") == []
    with pytest.raises(DatabaseError, match="no statistics database"):
        actor.register(fingerprint, str(tmp_path / "none"))


def test_a_corpus_of_another_tokenizer_is_not_offered(corpus, tmp_path):
    """Replicas that have none of their own would fetch it and could not draft from it."""
    actor = StatisticsDatabaseActor()
    with pytest.raises(DatabaseError, match="another tokenizer"):
        actor.register("another", str(corpus))
    assert actor.catalogue("another") == []
    with pytest.raises(DatabaseError, match="another tokenizer"):
        ensure_local("another", tmp_path, directories=[corpus])


def test_only_registered_files_are_handed_out(corpus, fingerprint):
    actor = StatisticsDatabaseActor()
    corpus_id = actor.register(fingerprint, str(corpus)).corpus_id
    assert bytes(actor.read_chunk(corpus_id, "info.json", 5)) == contents(corpus)["info.json"][5:]
    for name in ("../secret", "/etc/passwd", "tables"):
        with pytest.raises(DatabaseError, match="has no file"):
            actor.read_chunk(corpus_id, name, 0)
    with pytest.raises(DatabaseError, match="no corpus unknown"):
        actor.read_chunk("unknown", "info.json", 0)


def test_a_corpus_that_changed_is_not_handed_out(corpus, fingerprint):
    actor = StatisticsDatabaseActor()
    corpus_id = actor.register(fingerprint, str(corpus)).corpus_id
    (corpus / "empty.bin").write_bytes(b"x")
    with pytest.raises(DatabaseError, match="has changed"):
        actor.checksums(corpus_id)


def test_a_directory_is_offered_as_it_was_registered_last(corpus, fingerprint):
    actor = StatisticsDatabaseActor()
    before = actor.register(fingerprint, str(corpus))
    actor.checksums(before.corpus_id)
    (corpus / "empty.bin").write_bytes(b"x")
    after = actor.register(fingerprint, str(corpus))
    assert actor.catalogue(fingerprint) == [after]
    assert actor.checksums(after.corpus_id).keys() == after.sizes.keys()
    with pytest.raises(DatabaseError, match="no corpus"):
        actor.checksums(before.corpus_id)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestInRay:
    @pytest.fixture(autouse=True)
    def _actor(self) -> Iterator[None]:
        statistics_database.get_or_create()
        yield
        ray.kill(statistics_database.get_or_create())

    def test_a_node_that_has_the_directory_uses_it(self, corpus, fingerprint, tmp_path):
        cache = tmp_path / "cache"
        assert ensure_local(fingerprint, cache) == []
        assert ensure_local(fingerprint, cache, directories=[corpus]) == [corpus]
        assert ensure_local(fingerprint, cache) == [corpus]
        assert not cache.exists()

    def test_a_node_without_it_gets_a_checked_copy_once(self, corpus, fingerprint, tmp_path):
        actor = statistics_database.get_or_create()
        entry = ray.get(actor.register.remote(fingerprint, str(corpus)))
        cache = tmp_path / "cache"

        @ray.remote(num_cpus=0.1)
        def fetch() -> list[Path]:
            return ensure_local(fingerprint, cache, is_always_copied=True)

        copies = ray.get([fetch.remote() for _ in range(3)])
        assert copies == [[cache / entry.corpus_id]] * 3
        assert contents(copies[0][0]) == contents(corpus)
        written = (copies[0][0] / "tables" / "order-2.bin").stat().st_mtime_ns
        assert ensure_local(fingerprint, cache, is_always_copied=True) == copies[0]
        assert (copies[0][0] / "tables" / "order-2.bin").stat().st_mtime_ns == written
        assert [path.name for path in cache.iterdir() if path.is_dir()] == [entry.corpus_id]

    def test_a_copy_with_a_wrong_checksum_is_refused_and_removed(
        self, corpus, fingerprint, tmp_path
    ):
        actor = statistics_database.get_or_create()
        entry = ray.get(actor.register.remote(fingerprint, str(corpus)))
        ray.get(actor.checksums.remote(entry.corpus_id))
        path = corpus / "tables" / "order-2.bin"
        path.write_bytes(b"\0" * NUM_BYTES)
        cache = tmp_path / "cache"
        with pytest.raises(DatabaseError, match="wrong checksum"):
            ensure_local(fingerprint, cache, directories=[corpus], is_always_copied=True)
        assert [path for path in cache.iterdir() if path.is_dir()] == []

    def test_one_corpus_that_fails_does_not_take_the_others_along(
        self, corpus, fingerprint, tmp_path, caplog
    ):
        """One that was rebuilt in its place and not registered again."""
        other = make_corpus(tmp_path / "other", fingerprint, seed=1)
        cache, both = tmp_path / "cache", [corpus, other]
        assert ensure_local(fingerprint, cache, directories=both) == both
        (corpus / "empty.bin").write_bytes(b"x")
        assert ensure_local(fingerprint, cache) == [other]
        assert f"done without the corpus {corpus}" in caplog.text

    def test_a_corpus_that_was_rebuilt_in_its_place_is_fetched_by_other_nodes(
        self, corpus, fingerprint, tmp_path
    ):
        cache = tmp_path / "cache"
        assert ensure_local(fingerprint, cache, directories=[corpus]) == [corpus]
        (corpus / "empty.bin").write_bytes(b"x")
        assert ensure_local(fingerprint, cache, directories=[corpus]) == [corpus]
        (copy,) = ensure_local(fingerprint, cache, is_always_copied=True)
        assert contents(copy) == contents(corpus)

    def test_a_damaged_copy_is_fetched_again(self, corpus, fingerprint, tmp_path):
        cache = tmp_path / "cache"
        usual = {"directories": [corpus], "is_always_copied": True}
        (copy,) = ensure_local(fingerprint, cache, **usual)
        (copy / "tables" / "order-2.bin").write_bytes(b"short")
        assert ensure_local(fingerprint, cache, **usual) == [copy]
        assert contents(copy) == contents(corpus)

    def test_copies_of_what_is_offered_no_longer_are_deleted(self, corpus, fingerprint, tmp_path):
        """Of this tokenizer, and nobody else's."""
        cache = tmp_path / "cache"
        others = make_corpus(cache / "others", "others")
        usual = {"directories": [corpus], "is_always_copied": True}
        copies = []
        for seed in range(3):
            info = {"tokenizer": fingerprint, "seed": seed}
            (corpus / "info.json").write_text(json.dumps(info))
            copies += ensure_local(fingerprint, cache, **usual)
        kept = [path for path in cache.iterdir() if path.is_dir()]
        assert sorted(kept) == sorted([others, copies[-1]])

    def test_what_a_killed_process_had_fetched_is_deleted(self, corpus, fingerprint, tmp_path):
        """Not what one that lives is fetching."""
        cache = tmp_path / "cache"
        left, fetched = cache / ".left.partial", cache / ".fetched.partial"
        for directory in (left, fetched):
            directory.mkdir(parents=True)
            (directory / "info.json").write_text("half")
        with FileLock(cache / "fetched.lock"):
            ensure_local(fingerprint, cache, directories=[corpus])
        assert not left.exists()
        assert fetched.exists()

    def test_a_copy_is_used_while_the_actor_knows_of_none(self, corpus, fingerprint, tmp_path):
        """After its restart, until somebody offers what he has again."""
        cache = tmp_path / "cache"
        ensure_local(fingerprint, cache, directories=[corpus])
        copies = ensure_local(fingerprint, cache, is_always_copied=True)
        ray.kill(statistics_database.get_or_create())
        for _ in range(2):
            assert ensure_local(fingerprint, cache) == copies
        assert contents(copies[0]) == contents(corpus)
        assert ensure_local("another", cache) == []
        statistics_database.offer(fingerprint, corpus)
        assert ensure_local(fingerprint, cache) == [corpus]

    def test_it_works_again_after_the_actor_was_killed(self, corpus, fingerprint, tmp_path):
        cache = tmp_path / "cache"
        assert ensure_local(fingerprint, cache, directories=[corpus]) == [corpus]
        ray.kill(statistics_database.get_or_create(), no_restart=False)
        (copy,) = ensure_local(fingerprint, cache, directories=[corpus], is_always_copied=True)
        assert contents(copy) == contents(corpus)

    def test_errors_are_short_and_name_the_cause(self, corpus, fingerprint, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DatabaseError) as caught:
            ensure_local(
                fingerprint, tmp_path / "file", directories=[corpus], is_always_copied=True
            )
        assert "file" in str(caught.value)
        assert "Traceback" not in str(caught.value)
