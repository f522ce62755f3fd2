"""Several actors share the namespaces of one model, and replicas do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import ray

from actors import model_database
from actors.mirror import Mirror
from actors.sharded_mirror import ShardedMirror
from actors.shards import WHOLE, Shard, shard_of, shards
from actors.stop import stop_actors
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.segment import Segment
from hdserve.databases.snapshot import DatabaseKey
from tests.actors.replicas import Replica, quick_config
from tests.waiting import WAIT_S, eventually

NUM_SHARDS = 3
NAMESPACES = [f"tenant-{number}" for number in range(6)]


class Cluster:
    """Sharded mirrors of one model."""

    def __init__(self, directory: Path) -> None:
        self.key = DatabaseKey(f"model-{uuid4().hex[:8]}", "f" * 32)
        self.config = quick_config(directory, num_shards=NUM_SHARDS, num_cpus=0)
        self._mirrors: list[ShardedMirror] = []

    def mirror(self, replica: Replica) -> ShardedMirror:
        def make(shard: Shard) -> Mirror:
            return Mirror(self.key, self.config, replica, shard=shard)

        self._mirrors.append(ShardedMirror(NUM_SHARDS, make))
        return self._mirrors[-1]

    def kept(self) -> dict[Shard, set[str]]:
        """The namespaces each actor keeps."""
        actors = model_database.get_all(self.key, NUM_SHARDS)
        infos = ray.get([actor.info.remote() for actor in actors.values()], timeout=WAIT_S)
        return dict(zip(actors, (set(info["namespaces"]) for info in infos), strict=True))

    def close(self) -> None:
        for mirror in self._mirrors:
            mirror.close()
        stop_actors(model=self.key.model)


@pytest.fixture
def cluster(ray_cluster: None, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_every_namespace_has_one_shard() -> None:
    """The same in every process, in a range, and not all in one."""
    found = [shard_of(f"n{number}", 4) for number in range(1000)]
    assert set(found) == set(shards(4))
    assert min(found.count(shard) for shard in shards(4)) > 200
    assert shard_of("default", 4) == Shard(2, 4)
    assert shard_of("whatever", 1) == WHOLE


def test_what_replicas_keep_for_lost_disks_is_bounded_over_all_shards() -> None:
    """There is a mirror of each in a replica."""
    config, key = ModelDatabaseConfig(refill_bytes=1_600_000), DatabaseKey("m", "f" * 32)
    mirrors = [Mirror(key, config, Replica(), shard=shard) for shard in shards(16)]
    logs = [mirror._subscriptions[0]._kept for mirror in mirrors]
    for log in logs:
        for number in range(40):
            log.append("n", Segment.from_outputs("a", number, [np.ones(1000, np.uint32)]))
    assert 800_000 <= sum(log.num_bytes for log in logs) <= 1_600_000
    for mirror in mirrors:
        mirror.close()


def test_shards_write_to_directories_of_their_own(tmp_path: Path) -> None:
    """The whole writes where it always did."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path)
    assert WHOLE.config(config).snapshot_dir == tmp_path
    assert Shard(1, 4).config(config).snapshot_dir == tmp_path / "shard-2-of-4"
    assert Shard(1, 4).config(ModelDatabaseConfig()).snapshot_dir is None


@pytest.mark.ray
def test_replicas_share_through_the_shard_of_each_namespace(
    cluster: Cluster, tmp_path: Path
) -> None:
    """What one publishes the other gets; each actor keeps its own namespaces, on its own disk."""
    first, second = Replica(), Replica()
    one, two = cluster.mirror(first), cluster.mirror(second)
    for number, namespace in enumerate(NAMESPACES):
        two.of(namespace).use(namespace)
        one.of(namespace).publish(namespace, [number, number + 1])
    for number, namespace in enumerate(NAMESPACES):
        eventually(lambda: second.texts(namespace) == [[number, number + 1]])  # noqa: B023
    assert two.wait_until_current(WAIT_S)
    kept = cluster.kept()
    assert len(kept) > 1
    for namespace in NAMESPACES:
        assert [shard for shard, names in kept.items() if namespace in names] == [
            shard_of(namespace, NUM_SHARDS)
        ]
    assert {path.name for path in tmp_path.iterdir()} == {shard.label for shard in kept}
    eventually(lambda: one.stats().num_published_outputs == len(NAMESPACES))
    assert two.stats().num_received_outputs == len(NAMESPACES)
    assert 0 < two.stats().last_poll_age_s < WAIT_S


@pytest.mark.ray
def test_a_replica_knows_only_the_actors_it_needs(cluster: Cluster) -> None:
    """One namespace, one actor; and the loss of an actor is the loss of its namespaces only."""
    replica = Replica()
    mirror = cluster.mirror(replica)
    mirror.of(NAMESPACES[0]).use(NAMESPACES[0])
    assert mirror.wait_until_current(WAIT_S)
    assert set(cluster.kept()) == {shard_of(NAMESPACES[0], NUM_SHARDS)}
    other = next(name for name in NAMESPACES if shard_of(name, NUM_SHARDS) not in cluster.kept())
    teller = cluster.mirror(Replica())
    mirror.of(other).use(other)
    assert mirror.wait_until_current(WAIT_S)
    ray.kill(model_database.get(cluster.key, shard_of(NAMESPACES[0], NUM_SHARDS)))
    teller.of(other).publish(other, [1, 2, 3])
    eventually(lambda: replica.texts(other) == [[1, 2, 3]])


def test_without_a_namespace_there_is_nothing_to_tell() -> None:
    """No actor is asked before a request has come."""

    def make(shard: Shard) -> Mirror:
        raise AssertionError(shard)

    mirror = ShardedMirror(NUM_SHARDS, make)
    assert mirror.wait_until_current(0.0)
    assert mirror.stats().num_failures == 0
    mirror.close()
