"""``hdserve database stop``: the actors that outlive an application, ended on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from actors import model_database, statistics_database
from actors.shards import Shard
from actors.stop import _check_answers
from hdserve.cli.commands import app
from hdserve.cli.serve import check_answers
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.snapshot import DatabaseKey
from hdserve.errors import ConfigError, DatabaseError
from tests.clusters import patiently

pytestmark = pytest.mark.ray

KEYS = [DatabaseKey(name, "f" * 64) for name in ("a", "org/b:c")]


def stop(*arguments: str) -> list[str]:
    command = ["database", "stop", *arguments, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["address"] == ray.get_runtime_context().gcs_address
    stopped: list[str] = told["stopped"]
    return stopped


def stop_in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """By a process that is connected to no cluster yet."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-c", "from hdserve.cli import main; main()", "database", "stop"]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)


def test_stop(ray_cluster: None, tmp_path: Path) -> None:
    """One model's, then all; what is ended is gone, and a second time there is nothing."""
    for key in KEYS:
        model_database.get_or_create(key, ModelDatabaseConfig(num_cpus=0))
    shard = Shard(1, 2)
    model_database.get_or_create(KEYS[1], ModelDatabaseConfig(num_cpus=0), shard=shard)
    statistics_database.get_or_create()
    names = list(map(model_database.actor_name, KEYS))
    sharded = model_database.actor_name(KEYS[1], shard)
    assert set(stop("--model", "org/b:c")) == {names[1], sharded}
    with pytest.raises(ValueError, match="Failed to look up"):
        model_database.get(KEYS[1])
    assert set(stop()) == {names[0], statistics_database.ACTOR_NAME}
    assert stop() == []


def test_which_of_several_clusters(ray_cluster: None) -> None:
    """It has to be said; and it is said what it was done to."""
    own = ray.get_runtime_context().gcs_address
    node = {"num_cpus": 0, "include_dashboard": False}
    other = patiently(lambda: Cluster(initialize_head=True, head_node_args=node))
    address = other.address
    try:
        refused = stop_in_process()
        named = stop_in_process("--address", own)
    finally:
        other.shutdown()
    assert refused.returncode != 0
    assert "Ray clusters run on this machine" in refused.stderr
    assert own in refused.stderr
    assert address in refused.stderr
    assert (named.returncode, named.stdout) == (0, f"{own}: 0 ended\n")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_where_nobody_listens(address: str) -> None:
    """It is said at once, of a server as well; Ray by itself would try for minutes."""
    with pytest.raises(DatabaseError, match=f"no Ray cluster is reached at {address}: "):
        _check_answers(address)
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}, which RAY_ADD"):
        check_answers(address)


def test_what_is_no_address() -> None:
    with pytest.raises(ConfigError, match="HOST:PORT is expected"):
        check_answers("foo")
    refused = stop_in_process("--address", "foo")
    assert refused.returncode == 2
    assert refused.stderr.startswith("hdserve: no Ray cluster is reached at foo: ")
