"""``hdserve database stop``: the actors that outlive an application, ended on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors import model_database, statistics_database
from actors.shards import Shard
from hdserve.cli import app
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.snapshot import DatabaseKey

pytestmark = pytest.mark.ray

KEYS = [DatabaseKey(name, "f" * 64) for name in ("a", "org/b:c")]


def stop(*arguments: str) -> list[str]:
    command = ["database", "stop", *arguments, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    stopped: list[str] = json.loads(result.stdout)["stopped"]
    return stopped


def test_stop(ray_cluster: None, tmp_path: Path) -> None:
    """One model's, then all; what is ended is gone, and a second time there is nothing."""
    for key in KEYS:
        model_database.get_or_create(key, ModelDatabaseConfig(num_cpus=0))
    shard = Shard(1, 2)
    model_database.get_or_create(KEYS[1], ModelDatabaseConfig(num_cpus=0), shard=shard)
    statistics_database.get_or_create(num_cpus=0)
    names = list(map(model_database.actor_name, KEYS))
    sharded = model_database.actor_name(KEYS[1], shard)
    assert set(stop("--model", "org/b:c")) == {names[1], sharded}
    with pytest.raises(ValueError, match="Failed to look up"):
        model_database.get(KEYS[1])
    assert set(stop()) == {names[0], statistics_database.ACTOR_NAME}
    assert stop() == []
