"""The actors of a model's database are found by their names."""

from __future__ import annotations

from uuid import uuid4

import pytest

from actors import model_database
from actors.shards import WHOLE, Shard
from actors.stop import stop_actors
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.snapshot import DatabaseKey

pytestmark = pytest.mark.ray


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
