"""What a reader keeps and forgets, with an actor that is called directly."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors import mirror as mirrors
from actors import publisher, subscription
from actors.link import ActorLink, ActorUnreachable
from actors.mirror import MAX_FOLLOWED_NAMESPACES, Mirror
from actors.model_database_actor import ModelDatabaseActor
from actors.output_queue import OutputQueue
from actors.publisher import Publisher
from actors.subscription import IDLE_PER_POLL, Subscription
from hdserve.config import ModelDatabaseConfig
from hdserve.databases import seen_outputs
from hdserve.databases.messages import Publish, Standing
from hdserve.databases.output_files import directory_name
from hdserve.databases.output_log import OutputLog
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from tests.actors.readers import count_token

KEY = DatabaseKey("a-model", "f" * 32)


class DirectLink(ActorLink):
    """Calls an actor of this process; ``before`` is told of each call."""

    def __init__(self, actor: ModelDatabaseActor) -> None:
        super().__init__(lambda: actor, "the actor")
        self.actor = actor
        self.before: Callable[[str], None] = lambda method: None

    async def call(
        self, method: str, message: bytes, read: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        self.before(method)
        return read(getattr(self.actor, method)(message))


class Replica:
    def __init__(self, actor: ModelDatabaseActor, name: str = "r") -> None:
        self.link = DirectLink(actor)
        self.queue = OutputQueue(10**6)
        self.kept = OutputLog(10**6, 10**6)
        self.used = ["n"]
        self.has_enough = False
        self.forgotten: list[str] = []
        self.standings: list[Standing] = []
        self.delivered: list[str] = []
        self.subscription = Subscription(
            self.link, KEY, name, self.queue, self.kept, lambda: list(self.used), self, 10**6
        )
        self.publisher = Publisher(
            self.link, KEY, name, self.queue, self.kept, self.subscription, 1.0
        )

    def deliver(self, model: str, namespace: str, outputs: list[np.ndarray]) -> None:
        self.delivered += [namespace] * len(outputs)

    def is_behind(self) -> bool:
        return self.has_enough

    def deliver_calibration(self, model: str, namespace: str, calibration: bytes) -> None:
        raise AssertionError("nobody learned anything")

    def forget(self, model: str, namespace: str) -> None:
        self.forgotten.append(namespace)
        self.standings.append(self.subscription.standing(namespace))

    def poll(self) -> None:
        asyncio.run(self.subscription.poll())

    def publish(self, *token_ids: int) -> None:
        """One output in a message of its own; what is queued goes before it."""
        self.queue.put("n", token_ids)
        asyncio.run(self.publisher.publish_all())

    def count(self, token_id: int) -> int:
        return count_token(self.link.actor.export("n")[0], token_id)


def outputs(origin: str, num_tokens: int = 5) -> Segment:
    return Segment.from_outputs(origin, 0, [np.full(num_tokens, i, np.uint32) for i in range(3)])


def publish(
    actor: ModelDatabaseActor, namespace: str, origin: str = "w", num_tokens: int = 5
) -> None:
    actor.publish(Publish(origin, {namespace: outputs(origin, num_tokens)}).encode(KEY))


@pytest.fixture
def actor() -> ModelDatabaseActor:
    return ModelDatabaseActor(KEY, ModelDatabaseConfig())


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_flush_in_the_middle_of_a_refill_holds(actor, num_calls):
    """Before the first message of it, and between that and the last one."""
    publish(actor, "n")
    replica = Replica(actor)
    replica.poll()
    assert replica.kept.partition("n").num_outputs == 3
    replica.link.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    calls = []

    def flush_once(method: str) -> None:
        calls.append(method)
        if method == "publish" and calls.count("publish") == num_calls:
            replica.link.actor.flush("n")

    replica.link.before = flush_once
    for _ in range(3):
        replica.poll()
    assert calls.count("publish") >= num_calls
    assert replica.forgotten == ["n"]
    assert replica.kept.partition("n").num_outputs == 0
    assert "n" not in replica.link.actor.info()["namespaces"]


def test_a_refill_without_a_flush_arrives(actor):
    publish(actor, "n")
    replica = Replica(actor)
    replica.poll()
    replica.link.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    replica.poll()
    assert replica.link.actor.info()["namespaces"]["n"]["num_outputs"] == 3


def test_the_next_replica_is_asked_as_soon_as_one_has_given_all(actor):
    publish(actor, "n")
    replicas = [Replica(actor, "a"), Replica(actor, "b")]
    for replica in replicas:
        replica.poll()
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    for replica in replicas:
        calls: list[str] = []
        replica.link.actor, replica.link.before = actor, calls.append
        replica.poll()
        assert "publish" in calls


def test_a_refill_that_a_restart_interrupts_goes_on(tmp_path):
    """The actor that comes back has what was published since, and does not know what the one before
    it had lost: outputs of replicas that are gone."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path / "1", snapshot_interval_s=3600)
    actor = ModelDatabaseActor(KEY, config)
    replica = Replica(actor)
    for origin in ("gone-1", "gone-2"):
        publish(actor, "n", origin)
    replica.poll()
    config = config.model_copy(update={"snapshot_dir": tmp_path / "2"})
    actor = replica.link.actor = ModelDatabaseActor(KEY, config)

    def interrupt(method: str) -> None:
        if method == "publish":
            raise ActorUnreachable("killed")

    replica.link.before = interrupt
    with pytest.raises(ActorUnreachable):
        replica.poll()
    publish(actor, "n", "new")
    replica.link.before = lambda method: None
    actor._store.close()
    actor = replica.link.actor = ModelDatabaseActor(KEY, config)
    replica.poll()
    assert actor.info()["namespaces"]["n"]["num_outputs"] == 9
    num_refilled = replica.subscription.num_refilled_outputs
    replica.poll()
    assert replica.subscription.num_refilled_outputs == num_refilled


def test_what_was_not_followed_when_it_was_lost_is_given_back_later(actor):
    """When the namespace is used again; not if it was flushed meanwhile."""
    for name in ("n", "flushed"):
        publish(actor, name)
    replica = Replica(actor)
    replica.used = ["n", "flushed"]
    replica.poll()
    replica.used = []
    actor = replica.link.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    replica.poll()
    actor.flush("flushed")
    replica.poll()
    replica.used = ["n", "flushed"]
    replica.poll()
    assert count_token(actor.export("n")[0], 2) == 5
    assert count_token(actor.export("flushed")[0], 2) == 0
    assert replica.forgotten == ["flushed"]


def test_what_was_flushed_is_not_sent_to_an_actor_that_lost_its_disk(actor):
    """Though the fate of the message was unknown when it was; what was not flushed is."""
    replica = Replica(actor)
    replica.used = ["n", "m"]
    replica.poll()

    def interrupt(method: str) -> None:
        if method == "publish":
            raise ActorUnreachable("no answer")

    replica.link.before = interrupt
    replica.queue.put("m", [2])
    replica.publish(1)
    actor.flush("n")
    replica.poll()
    replica.link.before = lambda method: None
    actor = replica.link.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    replica.publish(3)
    assert [replica.count(number) for number in (1, 3)] == [0, 1]
    assert count_token(actor.export("m")[0], 2) == 1


def test_what_was_flushed_before_it_was_sent_is_counted(actor):
    """And not as published; neither is what else the actor leaves out of the next message."""
    replica = Replica(actor)
    replica.used = ["n", "m"]
    replica.poll()

    def interrupt(method: str) -> None:
        raise ActorUnreachable("no answer")

    replica.link.before = interrupt
    replica.publish(1)
    replica.link.before = lambda method: None
    actor.flush("n")
    replica.poll()
    replica.queue.put("m", [2])
    replica.link.before = lambda method: actor.flush("m")
    asyncio.run(replica.publisher.publish_all())
    assert (replica.publisher.num_flushed, replica.publisher.num_outputs) == (2, 0)


def test_a_replica_forgets_what_it_no_longer_follows(actor):
    """Every namespace that is flushed, in turns, and without the text that came since."""
    names = [f"n{number}" for number in range(IDLE_PER_POLL + 10)]
    replica = Replica(actor)
    replica.used = names
    for name in names:
        publish(actor, name)
    replica.poll()
    replica.poll()
    assert sorted(replica.delivered) == sorted(names * 3)
    replica.used = []
    for name in names[5:]:
        actor.flush(name)
    publish(actor, names[0], "later")
    for _ in range(4):
        replica.poll()
    assert sorted(replica.forgotten) == sorted(names[5:])
    assert all(replica.kept.partition(name).num_outputs == 0 for name in names[5:])
    assert len(replica.delivered) == 3 * len(names)


def test_what_is_not_followed_is_forgotten_after_a_restart_too(actor):
    """The version numbers that the replica knows mean nothing to the new actor."""
    publish(actor, "n")
    replica = Replica(actor)
    replica.poll()
    replica.used = ["other"]
    replica.link.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    replica.poll()
    replica.link.actor.flush("n")
    replica.poll()
    replica.poll()
    assert replica.forgotten == ["n"]


def test_only_what_was_used_here_is_remembered(actor):
    """However many namespaces others feed and operators flush."""
    replica = Replica(actor)
    for number in range(50):
        publish(actor, f"n{number}")
        actor.flush(f"n{number - 1}")
        replica.used = ["n", f"n{number % 3}"]
        replica.poll()
    assert sorted(replica.subscription._positions) == ["n", "n0", "n1", "n2"]


@pytest.mark.parametrize("used", [["n"], []])
def test_a_flush_reaches_a_replica_that_shares_nothing(actor, used):
    """It holds the prompts of the namespace, used now or long ago; one that has just begun holds
    none."""
    replica, fresh = Replica(actor), Replica(actor)
    replica.poll()
    replica.used = used
    actor.flush("n")
    for each in (replica, fresh):
        each.poll()
        each.poll()
    assert replica.forgotten == ["n"]
    assert fresh.forgotten == []


def test_a_flush_that_was_heard_of_long_ago_takes_no_later_text(actor):
    """Though nobody followed the namespace then, and text ends before the actor is asked again."""
    publish(actor, "n")
    replica = Replica(actor)
    replica.poll()
    replica.used = []
    actor.flush("n")
    replica.poll()
    assert replica.forgotten == ["n"]
    replica.used = ["n"]
    replica.queue.put("n", [7])
    replica.poll()
    asyncio.run(replica.publisher.publish_all())
    assert replica.forgotten == ["n"]
    assert replica.count(7) == 1


def test_the_actor_is_asked_again_when_something_is_due():
    replica = Replica(ModelDatabaseActor(KEY, ModelDatabaseConfig(poll_interval_s=60)))
    calls: list[str] = []
    replica.link.before = calls.append

    async def count_calls() -> None:
        polling = asyncio.create_task(replica.subscription.run())
        for number in range(1, 4):
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(calls) == number
            replica.subscription.is_due.set()
        polling.cancel()

    asyncio.run(count_calls())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def fallen_behind(replica: Replica) -> AsyncIterator[None]:
    """It follows an actor that has more for it than one reply holds, and had enough of the
    first."""
    for origin in "abcd":
        publish(replica.link.actor, "n", origin, num_tokens=10_000)
    replica.has_enough = True
    polling = asyncio.create_task(replica.subscription.run())
    await until(lambda: bool(replica.delivered))
    yield
    polling.cancel()


def test_what_is_left_waits_for_a_receiver_that_is_behind(actor, monkeypatch):
    """It stays with the actor, and comes when there is room."""
    monkeypatch.setattr(subscription, "_MAX_BEHIND_S", math.inf)
    replica = Replica(actor)

    async def follow() -> None:
        async with fallen_behind(replica):
            num_first = len(replica.delivered)
            await asyncio.sleep(0.1)
            assert len(replica.delivered) == num_first < 12
            replica.has_enough = False
            await until(lambda: len(replica.delivered) == 12)

    asyncio.run(follow())


def test_a_receiver_that_is_behind_is_told_of_flushes(actor):
    replica = Replica(actor)

    async def follow() -> None:
        async with fallen_behind(replica):
            actor.flush("n")
            await until(lambda: replica.forgotten == ["n"])

    asyncio.run(follow())


def test_a_replica_is_told_of_a_flush_that_comes_before_its_first_news(actor):
    """It has published, and the namespace was flushed, since it asked for the last time."""
    replica = Replica(actor)
    replica.poll()
    replica.publish(1)
    actor.flush("n")
    replica.poll()
    assert replica.forgotten == ["n"]
    assert replica.kept.partition("n").num_outputs == 0


@pytest.mark.parametrize("num_polls", [0, 1, 2])
def test_a_message_from_before_a_flush_counts_for_nothing(actor, num_polls):
    """It was under way, and is sent again when the replica has heard of the flush."""
    replica = Replica(actor)
    for _ in range(num_polls):
        replica.poll()
    message = replica.subscription.publication(["n", "m"])
    message = replace(message, outputs={"n": outputs("r"), "m": outputs("r")})
    actor.flush("n")
    assert actor.publish(message.encode(KEY)) == 3
    replica.poll()
    assert actor.publish(message.encode(KEY)) == 0
    assert "n" not in actor.info()["namespaces"]
    replica.publish(7)
    assert replica.count(7) == 1


@pytest.mark.parametrize("polls_first", [True, False])
def test_what_cannot_be_told_from_flushed_text_is_counted(actor, polls_first):
    """A replica does not know, before it has heard of the actor, that the flush was long ago."""
    actor.flush("n")
    replica = Replica(actor)
    replica.queue.put("n", [1])
    if polls_first:
        replica.poll()
    replica.publish(2)
    assert [replica.count(number) for number in (1, 2)] == [0, int(polls_first)]
    num_lost = replica.queue.num_forgotten + replica.publisher.num_flushed
    assert (num_lost, replica.publisher.num_outputs) == ((1, 1) if polls_first else (2, 0))
    replica.poll()
    replica.publish(3)
    assert replica.count(3) == 1


def test_what_ends_after_a_restart_of_a_flushed_database_is_kept(tmp_path):
    """Where the replica stood in the run before is known to the new one."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path, snapshot_interval_s=3600)
    replica = Replica(ModelDatabaseActor(KEY, config))
    replica.publish(1)
    replica.link.actor.flush("n")
    replica.poll()
    replica.publish(2)
    replica.link.actor._store.close()
    replica.link.actor = ModelDatabaseActor(KEY, config)
    replica.publish(3)
    assert [replica.count(number) for number in (1, 2, 3)] == [0, 1, 1]


@pytest.mark.parametrize("num_polls", [0, 1])
@pytest.mark.parametrize("is_torn", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_what_a_log_lost_after_the_last_poll_is_given_back(tmp_path, num_polls, is_torn, goes_on):
    """A record cut short, or none of it left; before or after the replica published more."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path, snapshot_interval_s=3600)
    actor = ModelDatabaseActor(KEY, config)
    replica, other = Replica(actor), Replica(actor, "s")
    replica.publish(1)
    for _ in range(num_polls):
        replica.poll()
    (log,) = tmp_path.rglob("*.log")
    size = log.stat().st_size
    replica.publish(2)
    log.write_bytes(log.read_bytes()[: -1 if is_torn else size])
    actor._store.close()
    replica.link.actor = other.link.actor = ModelDatabaseActor(KEY, config)
    assert [replica.count(number) for number in (1, 2)] == [1, 0]
    other.poll()
    if goes_on:
        replica.publish(3)
    replica.poll()
    assert [replica.count(number) for number in (1, 2, 3)] == [1, 1, int(goes_on)]
    assert replica.subscription.num_refilled_outputs == 1


def test_nothing_is_asked_back_that_is_there(tmp_path):
    config = ModelDatabaseConfig(snapshot_dir=tmp_path, snapshot_interval_s=3600)
    replica = Replica(ModelDatabaseActor(KEY, config))
    replica.publish(1)
    replica.link.actor.flush("n")
    replica.poll()
    calls: list[str] = []
    replica.link.before = calls.append
    for number in (2, 3):
        replica.publish(number)
        replica.link.actor._store.close()
        replica.link.actor = ModelDatabaseActor(KEY, config)
        replica.publish(10 + number)
        replica.poll()
    assert calls == ["publish", "publish", "changes_since"] * 2


def test_no_number_is_used_again_however_many_namespaces_come_and_go(actor, monkeypatch):
    """Those of the last ones are known; an output with a number of another would not be taken."""
    monkeypatch.setattr(publisher, "MAX_NUMBERED_NAMESPACES", 2)
    replica = Replica(actor)
    replica.used = list("abcd")
    for name in "aabcadba":
        replica.queue.put(name, [1])
        asyncio.run(replica.publisher.publish_all())
        replica.poll()
    namespaces = actor.info()["namespaces"]
    assert [namespaces[name]["num_outputs"] for name in "abcd"] == [4, 2, 1, 1]
    assert len(replica.publisher._next_numbers) == 2
    assert not replica.subscription._uncovered


def test_a_replica_stands_no_further_than_its_receiver_was_told(actor):
    """So that what it learned before it heard of a flush never counts as learned afterwards."""
    publish(actor, "n")
    replica = Replica(actor)
    assert replica.subscription.standing("n") == ("", 0)
    replica.poll()
    before = replica.subscription.standing("n")
    actor.flush("n")
    replica.poll()
    after = replica.subscription.standing("n")
    assert replica.standings == [before]
    assert before.epoch == after.epoch
    assert before.cursor < after.cursor


def test_only_the_namespaces_used_last_are_followed():
    """More than fit a poll may have been used."""
    mirror = Mirror(KEY, ModelDatabaseConfig(), Replica(None))
    names = [f"n{number}" for number in range(MAX_FOLLOWED_NAMESPACES + 10)]
    for name in [*names, names[0]]:
        mirror.use(name)
    assert set(mirror._used_namespaces()) == {names[0], *names[11:]}
    mirror.close()


def test_namespaces_that_were_not_used_for_long_are_forgotten_where_there_are_many(monkeypatch):
    monkeypatch.setattr(mirrors, "NAMESPACE_IDLE_S", 0.0)
    mirror = Mirror(KEY, ModelDatabaseConfig(), Replica(None))
    for number in range(MAX_FOLLOWED_NAMESPACES + 1):
        mirror.use(f"n{number}")
    time.sleep(0.01)
    assert mirror._used_namespaces() == []
    assert mirror._last_used == {}
    mirror.close()


def test_what_the_actor_evicted_is_not_asked_back(tmp_path):
    """A poll says only what was published since the one before it."""
    config = ModelDatabaseConfig(
        snapshot_dir=tmp_path, snapshot_interval_s=3600, max_bytes=2**16, max_total_bytes=2**16
    )
    replica = Replica(ModelDatabaseActor(KEY, config))
    for number in range(40):
        replica.publish(*[number] * 1000)
        replica.poll()
    assert replica.count(0) == 0
    replica.publish(1)
    replica.link.actor._store.close()
    replica.link.actor = ModelDatabaseActor(KEY, config)
    replica.poll()
    assert replica.subscription.num_refilled_outputs == 0
    assert replica.count(39) == 1000


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_what_was_evicted_does_not_come_back_with_what_was_lost(tmp_path, has_snapshot):
    """Where it would be taken for the newest, and push out what is newer."""
    config = ModelDatabaseConfig(
        snapshot_dir=tmp_path, snapshot_interval_s=3600, max_bytes=2**16, max_total_bytes=2**16
    )
    actor = ModelDatabaseActor(KEY, config)
    replica = Replica(actor)
    for number in range(40):
        replica.publish(*[number] * 1000)
    if has_snapshot:
        assert actor.snapshot_now()
    replica.publish(*[40] * 1000)
    log = max(tmp_path.rglob("*.log"))
    log.write_bytes(log.read_bytes()[:-1])
    kept = [number for number in range(40) if replica.count(number)]
    actor._store.close()
    replica.link.actor = ModelDatabaseActor(KEY, config)
    assert replica.count(40) == 0
    replica.poll()
    assert replica.subscription.num_refilled_outputs == 1
    assert [number for number in range(41) if replica.count(number)] == [*kept, 40]


@pytest.fixture
def crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Replica]:
    """More replicas than a database remembers of which it keeps nothing, with one output each."""
    monkeypatch.setattr(seen_outputs, "MAX_TOTAL_ORIGINS", 4)
    monkeypatch.setattr(seen_outputs, "MIN_ORIGINS", 2)
    actor = ModelDatabaseActor(
        KEY, ModelDatabaseConfig(snapshot_dir=tmp_path, snapshot_interval_s=3600)
    )
    replicas = [Replica(actor, f"r{number}") for number in range(8)]
    for replica in replicas:
        replica.used = ["n", "other"]
        replica.poll()
    for number, replica in enumerate(replicas):
        replica.publish(number)
    return replicas


def poll_twice(replicas: list[Replica]) -> None:
    for replica in [*replicas, *replicas]:
        replica.poll()


def test_replicas_are_not_forgotten_while_others_publish(crowd):
    """Otherwise their own outputs, which no cursor has passed, would look lost."""
    poll_twice(crowd)
    assert [replica.subscription.num_refilled_outputs for replica in crowd] == [0] * 8
    assert [crowd[0].count(number) for number in range(8)] == [1] * 8
    assert all(replica.delivered == ["n"] * 7 for replica in crowd)


def test_what_many_replicas_generated_comes_once_though_a_file_was_lost(crowd, tmp_path):
    crowd[0].queue.put("other", [9])
    crowd[0].publish(8)
    poll_twice(crowd)
    (log,) = tmp_path.rglob(f"{directory_name('other')}/*.log")
    log.write_bytes(b"junk" * 20)
    crowd[0].link.actor._store.close()
    actor = ModelDatabaseActor(KEY, crowd[0].link.actor._config)
    for replica in crowd:
        replica.link.actor = actor
    poll_twice(crowd)
    assert actor.info()["num_refused_files"] == 1
    assert [crowd[0].count(number) for number in range(9)] == [1] * 9
    assert count_token(actor.export("other")[0], 9) == 1
    assert all(sorted(replica.delivered) == ["n"] * 8 + ["other"] for replica in crowd[1:])
    assert [replica.subscription.num_refilled_outputs for replica in crowd] == [1] + [0] * 7
