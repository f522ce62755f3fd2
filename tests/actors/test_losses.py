"""What a power failure took of a log is given back, whenever the actor is restarted again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.link import ActorUnreachable
from actors.model_database_actor import ModelDatabaseActor
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import Publish
from hdserve.databases.segment import Segment
from tests.actors.test_subscription import KEY, Replica
from tests.databases.test_output_store_damage import SmallDisk


class Cluster:
    """An actor with a disk, and replicas, all of which follow the namespace ``n``."""

    def __init__(self, directory: Path) -> None:
        self.config = ModelDatabaseConfig(snapshot_dir=directory, snapshot_interval_s=3600)
        self.actor = ModelDatabaseActor(KEY, self.config)
        self.replicas: list[Replica] = []

    def add(self, name: str) -> Replica:
        self.replicas.append(Replica(self.actor, name))
        return self.replicas[-1]

    def restart(self) -> None:
        """As after ``kill -9``."""
        self.actor._store.close()
        self.actor = ModelDatabaseActor(KEY, self.config)
        for replica in self.replicas:
            replica.link.actor = self.actor

    def lose_last(self, num_records: int = 1) -> None:
        """As a power failure leaves the newest log; then the actor starts again."""
        log = max(self.config.snapshot_dir.rglob("*.log"))
        data, ends = log.read_bytes(), [0]
        while ends[-1] < len(data):
            ends.append(ends[-1] + 8 + int.from_bytes(data[ends[-1] : ends[-1] + 4], "little"))
        log.write_bytes(data[: ends[-1 - num_records]])
        self.restart()

    def count(self, *token_ids: int) -> list[int]:
        return [self.replicas[0].count(token_id) for token_id in token_ids]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def cut_off(replica: Replica) -> None:
    """No message of outputs reaches the actor any longer."""

    def interrupt(method: str) -> None:
        if method == "publish":
            raise ActorUnreachable("killed")

    replica.link.before = interrupt


def connect(replica: Replica) -> None:
    replica.link.before = lambda method: None


def give_nothing(replica: Replica) -> None:
    """Poll; what the actor asks for does not reach it."""
    cut_off(replica)
    with pytest.raises(ActorUnreachable):
        replica.poll()
    connect(replica)


def lose_one_of_two(cluster: Cluster, writer: Replica, reader: Replica | None = None) -> Replica:
    """``writer`` publishes 1 and 2, of which ``reader`` hears, itself unless it is another; 2 is
    lost.  Returns the reader."""
    reader = reader or writer
    writer.publish(1)
    writer.publish(2)
    reader.poll()
    cluster.lose_last()
    return reader


def test_a_loss_is_found_two_restarts_later(cluster):
    """Though something came in the run of which the replica has not heard."""
    replica = lose_one_of_two(cluster, cluster.add("r"))
    cluster.add("s").publish(3)
    cluster.restart()
    assert cluster.count(1, 2, 3) == [1, 0, 1]
    replica.poll()
    assert cluster.count(1, 2, 3) == [1, 1, 1]


def test_what_was_asked_for_is_given_to_the_next_run(cluster):
    """The replica has heard of all that came since, so its cursor tells nothing."""
    replica = lose_one_of_two(cluster, cluster.add("r"))
    cluster.add("s").publish(3)
    give_nothing(replica)
    cluster.restart()
    replica.poll()
    assert cluster.count(1, 2, 3) == [1, 1, 1]


def test_who_was_not_asked_yet_gives_what_it_has_to_the_next_run(cluster):
    """Another one was, and would have been given time to answer."""
    replica, other = cluster.add("r"), cluster.add("s")
    other.publish(1)
    replica.publish(2)
    replica.poll()
    cluster.lose_last(2)
    give_nothing(other)
    other.publish(3)
    replica.poll()
    assert cluster.count(1, 2, 3) == [0, 0, 1]
    cluster.restart()
    replica.poll()
    assert cluster.count(1, 2, 3) == [1, 1, 1]


def test_what_was_given_back_and_lost_again_is_given_again(cluster):
    """Before the replica has asked what came since, which would cover it; then no longer."""
    gone, replica = cluster.add("gone"), cluster.add("r")
    lose_one_of_two(cluster, gone, reader=replica)
    gone.publish(3)
    replica.poll()
    assert cluster.count(1, 2, 3) == [1, 1, 1]
    cluster.lose_last()
    assert cluster.count(1, 2, 3) == [1, 0, 1]
    replica.poll()
    assert cluster.count(1, 2, 3) == [1, 1, 1]
    replica.poll()
    num_refilled = replica.subscription.num_refilled_outputs
    cluster.restart()
    replica.poll()
    assert replica.subscription.num_refilled_outputs == num_refilled


def test_what_was_not_followed_when_a_log_lost_it_is_given_back(cluster):
    replica = cluster.add("r")
    replica.publish(1)
    replica.publish(2)
    replica.poll()
    replica.used = []
    cluster.lose_last()
    replica.poll()
    assert cluster.count(1, 2) == [1, 0]
    replica.used = ["n"]
    replica.poll()
    assert cluster.count(1, 2) == [1, 1]


def test_what_stood_in_a_file_that_was_set_aside_is_asked_for_after_each_restart(cluster):
    replica, other = cluster.add("r"), cluster.add("s")
    replica.publish(1)
    replica.poll()
    cluster.restart()
    other.publish(2)
    replica.poll()
    oldest = min(cluster.config.snapshot_dir.rglob("*.log"))
    oldest.write_bytes(b"junk, and as much of it as a record needs to be one")
    cluster.restart()
    cluster.restart()
    assert cluster.count(1, 2) == [0, 1]
    replica.poll()
    assert cluster.count(1, 2) == [1, 1]


@pytest.mark.parametrize("which", [0, 1])
def test_a_log_that_was_lost_before_others_is_given_back(cluster, which):
    """As where several became full since the last snapshot."""
    num_outputs = 20
    replica = cluster.add("r")
    for number in range(num_outputs):
        part = Segment.from_outputs("w", number, [np.full(8000, number, np.uint32)])
        cluster.actor.publish(Publish("w", {"n": part}).encode(KEY))
    while replica.kept.partition("n").num_outputs < num_outputs:
        replica.poll()
    sorted(cluster.config.snapshot_dir.rglob("*.log"))[which].unlink()
    cluster.restart()
    assert cluster.actor.info()["namespaces"]["n"]["num_outputs"] < num_outputs
    replica.poll()
    assert cluster.actor.info()["namespaces"]["n"]["num_outputs"] == num_outputs


def test_what_came_on_a_disk_that_was_full_from_the_start_is_given_back(cluster, monkeypatch):
    """Also where a flush was before it: replicas know what came after that."""
    replica, other = cluster.add("r"), cluster.add("s")
    replica.publish(1)
    cluster.actor.flush("n")
    for each in (replica, other):
        each.poll()
    with monkeypatch.context() as patch:
        SmallDisk(patch, cluster.config.snapshot_dir, 0)
        cluster.restart()
        replica.publish(2)
        other.poll()
        replica.poll()
        replica.publish(3)
    cluster.restart()
    replica.publish(4)
    for _ in range(2):
        replica.poll()
        other.poll()
    assert cluster.count(1, 2, 3, 4) == [0, 1, 1, 1]
