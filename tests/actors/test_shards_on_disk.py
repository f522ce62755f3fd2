"""Shards of which no actor runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import ray

from actors import model_database
from actors.shards import shard_of
from actors.stop import stop_actors
from deployments.http.cluster_database import ClusterDatabase
from hdserve.config import ModelDatabaseConfig
from tests.deployments.http.cluster_databases import KEY, archive_of, database
from tests.waiting import WAIT_S

NAMESPACES = ["tenant-1", "tenant-2"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_shards_that_are_on_disk_alone(tmp_path: Path) -> None:
    """As those of tenants who have asked nothing since the cluster was started: they are listed and
    exported, and their actors, no others, are started for it."""
    config = ModelDatabaseConfig(snapshot_dir=tmp_path, num_shards=64, num_cpus=0)
    used = {shard_of(name, 64) for name in NAMESPACES}
    for shard in used:
        actor = model_database.get_or_create(KEY, config, shard=shard)
        for name in NAMESPACES:
            if shard_of(name, 64) == shard:
                ray.get(actor.import_.remote(archive_of(name).encode(KEY)), timeout=WAIT_S)
    stop_actors(model=KEY.model)
    found = ClusterDatabase(KEY, config, {})

    async def exported() -> list[bytes]:
        names = list((await found.info())["namespaces"])
        return [record async for record in found.export(names)]

    records = asyncio.run(exported())
    assert set(model_database.get_all(KEY, 64)) == {*used, shard_of("default", 64)}
    stop_actors(model=KEY.model)
    _, target = database()

    async def chunks() -> AsyncIterator[bytes]:
        for record in records:
            yield record

    assert asyncio.run(target.import_(chunks())) == len(NAMESPACES)
