"""The actors of a model's database are found by their names."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
import ray

from actors import detached, model_database
from actors.model_database_actor import ModelDatabaseActor
from actors.shards import WHOLE, Shard
from actors.stop import stop_actors
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.snapshot import FORMAT_VERSION, DatabaseKey
from tests.actors.impatient import ImpatientDatabaseActor
from tests.actors.readers import message
from tests.waiting import WAIT_S

METHODS = {
    1: {
        *("publish", "changes_since", "flush", "flush_former", "export", "shards_on_disk"),
        *("import_", "snapshot_now", "info", "close"),
    }
}
"""What may be called, by the version that is in the actor's name."""


@pytest.mark.ray
def test_actors_of_the_former_number_of_shards_or_tokenizer(ray_cluster: None) -> None:
    """Are told from the current ones, and from those of a model that is called alike."""
    key = DatabaseKey(f"org/{uuid4().hex[:8]}:b", "f" * 32)
    former, alike = DatabaseKey(key.model, "e" * 32), DatabaseKey(f"{key.model}:b", "f" * 32)
    config = ModelDatabaseConfig(num_cpus=0)
    started = [(key, Shard(1, 2)), (key, WHOLE), (former, WHOLE), (alike, WHOLE)]
    handles = {
        each: model_database.get_or_create(each[0], config, shard=each[1]) for each in started
    }
    try:
        found = {
            num_shards: {(shard, actor._actor_id) for shard, actor in actors}
            for num_shards in (1, 2)
            for actors in [model_database.get_former(key, num_shards)]
        }
    finally:
        for model in (key.model, alike.model):
            stop_actors(model=model)
    expected = [(shard, handles[each, shard]._actor_id) for each, shard in started]
    assert found == {1: {expected[0], expected[2]}, 2: {expected[1], expected[2]}}


def test_other_methods_are_another_version() -> None:
    """One that is not called so any more may still run, and has not learned them."""
    methods = {name for name in vars(ModelDatabaseActor) if not name.startswith("_")}
    assert methods == METHODS[model_database.METHODS_VERSION]


@pytest.mark.ray
def test_what_an_actor_of_an_earlier_version_keeps(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is read from the disk by the one beside it, which writes when it has ended."""
    monkeypatch.setattr(model_database, "ModelDatabaseActor", ImpatientDatabaseActor)
    key = DatabaseKey(f"org/{uuid4().hex[:8]}", "f" * 32)
    config = ModelDatabaseConfig(num_cpus=0, snapshot_dir=tmp_path, snapshot_interval_s=3600)
    name = f"model-database-v{FORMAT_VERSION}:{key.model}:{key.fingerprint[:16]}"
    earlier = detached.get_or_create(ModelDatabaseActor, name, 0, {}, key, config)
    try:
        ray.get(earlier.publish.remote(message(0, 3, key=key)), timeout=WAIT_S)
        actor = model_database.get_or_create(key, config)
        assert actor._actor_id != earlier._actor_id
        assert not ray.get(actor.snapshot_now.remote(), timeout=WAIT_S)
        assert set(ray.get(actor.info.remote(), timeout=WAIT_S)["namespaces"]) == {"n"}
        ray.get(earlier.close.remote(), timeout=WAIT_S)
        assert ray.get(actor.snapshot_now.remote(), timeout=WAIT_S)
    finally:
        assert name in stop_actors(model=key.model).names
