"""What a reader keeps and forgets, with an actor that is called directly."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from actors.link import ActorLink
from actors.mirror import MAX_FOLLOWED_NAMESPACES, Mirror
from actors.model_database import ModelDatabaseActor
from actors.subscription import IDLE_PER_POLL, Subscription
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import Publish, Standing
from hdserve.databases.output_log import OutputLog
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey

KEY = DatabaseKey("a-model", "f" * 32)


class DirectLink(ActorLink):
    """Calls an actor of this process; ``before`` is told of each call."""

    def __init__(self, actor: ModelDatabaseActor) -> None:
        super().__init__(lambda: actor, "the actor")
        self.actor = actor
        self.before: Callable[[str], None] = lambda method: None

    async def call(self, method: str, message: bytes) -> Any:
        self.before(method)
        return getattr(self.actor, method)(message)


class Replica:
    def __init__(self, actor: ModelDatabaseActor, name: str = "r") -> None:
        self.link = DirectLink(actor)
        self.kept = OutputLog(10**6, 10**6)
        self.used = ["n"]
        self.forgotten: list[str] = []
        self.standings: list[Standing] = []
        self.delivered: list[str] = []
        self.subscription = Subscription(
            self.link, KEY, name, self.kept, lambda: list(self.used), self
        )

    def deliver(self, model: str, namespace: str, outputs: list[np.ndarray]) -> None:
        self.delivered += [namespace] * len(outputs)

    def deliver_calibration(self, model: str, namespace: str, calibration: bytes) -> None:
        raise AssertionError("nobody learned anything")

    def forget(self, model: str, namespace: str) -> None:
        self.forgotten.append(namespace)
        self.standings.append(self.subscription.standing(namespace))

    def poll(self) -> None:
        asyncio.run(self.subscription.poll())


def outputs(origin: str, num: int = 3) -> Segment:
    return Segment.from_outputs(origin, 0, [np.full(5, i, np.uint32) for i in range(num)])


def publish(actor: ModelDatabaseActor, namespace: str, origin: str = "w") -> None:
    actor.publish(Publish(origin, {namespace: outputs(origin)}).encode(KEY))


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
    assert replica.link.actor.info()["namespaces"]["n"]["num_outputs"] == 0


def test_a_refill_without_a_flush_arrives(actor):
    publish(actor, "n")
    replica = Replica(actor)
    replica.poll()
    replica.link.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    replica.poll()
    assert replica.link.actor.info()["namespaces"]["n"]["num_outputs"] == 3


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


def test_a_replica_is_told_of_a_flush_that_comes_before_its_first_news(actor):
    """It has published, and the namespace was flushed, since it asked for the last time."""
    replica = Replica(actor)
    replica.poll()
    publish(actor, "n", "r")
    replica.kept.append("n", outputs("r"))
    actor.flush("n")
    replica.poll()
    assert replica.forgotten == ["n"]
    assert replica.kept.partition("n").num_outputs == 0


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
