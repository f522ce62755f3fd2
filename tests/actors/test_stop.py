"""``hdserve database stop``: the actors that outlive an application, ended on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from actors import detached, model_database, statistics_database
from actors.shards import Shard
from actors.stop import _check_answers
from hdserve.cli.commands import app
from hdserve.cli.serve import check_answers
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.output_files import database_directory
from hdserve.databases.snapshot import DatabaseKey
from hdserve.databases.stored import describe
from hdserve.errors import ConfigError, DatabaseError
from tests.actors.impatient import ImpatientDatabaseActor
from tests.actors.readers import message
from tests.clusters import patiently
from tests.waiting import WAIT_S, eventually

pytestmark = pytest.mark.ray

KEYS = [DatabaseKey(name, "f" * 64) for name in ("a", "org/b:c")]


@pytest.fixture
def empty_cluster(ray_cluster: None) -> None:
    """The one of the package, without the actors that earlier tests left."""
    for name in detached.names():
        ray.kill(detached.get(name))
    eventually(lambda: not detached.names())


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


def test_stop(empty_cluster: None, tmp_path: Path) -> None:
    """One model's, then all; what is ended is gone, and a second time there is nothing."""
    config, shard = ModelDatabaseConfig(num_cpus=0), Shard(1, 2)
    actors = [model_database.get_or_create(key, config) for key in KEYS]
    actors.append(model_database.get_or_create(KEYS[1], config, shard=shard))
    ray.get([actor.info.remote() for actor in actors], timeout=WAIT_S)
    ray.get(statistics_database.get_or_create().age_s.remote(), timeout=WAIT_S)
    names = list(map(model_database.actor_name, KEYS))
    sharded = model_database.actor_name(KEYS[1], shard)
    assert set(stop("--model", "org/b:c")) == {names[1], sharded}
    with pytest.raises(ValueError, match="Failed to look up"):
        model_database.get(KEYS[1])
    assert set(stop()) == {names[0], statistics_database.ACTOR_NAME}
    assert stop() == []


def test_what_cannot_be_written_is_not_lost(empty_cluster: None, tmp_path: Path) -> None:
    """The actor stays, and those that can write end; unless it is to end all the same."""
    blocked, free = (DatabaseKey(uuid4().hex, "f" * 64) for _ in range(2))
    lock = database_directory(tmp_path, blocked) / "lock"
    lock.mkdir(parents=True)
    config = ModelDatabaseConfig(num_cpus=0, snapshot_dir=tmp_path)
    for key in (blocked, free):
        actor = model_database.get_or_create(key, config)
        ray.get(actor.publish.remote(message(0, 3, key=key)), timeout=WAIT_S)
    command = ["database", "stop", "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["stopped"] == [model_database.actor_name(free)]
    ((name, reason),) = told["not_stopped"].items()
    assert name == model_database.actor_name(blocked)
    assert f"{lock.parent} cannot be written: " in reason
    assert f"hdserve: {name} is not ended" in result.stderr
    actor = model_database.get(blocked)
    assert "n" in ray.get(actor.info.remote(), timeout=WAIT_S)["namespaces"]
    assert stop("--force") == [name]
    with pytest.raises(ValueError, match="Failed to look up"):
        model_database.get(blocked)


def test_one_that_waits_for_the_files_of_another(empty_cluster: None, tmp_path: Path) -> None:
    """As a newer version beside an older one: it writes when that has ended, whichever is asked
    first."""
    key = DatabaseKey(uuid4().hex, "f" * 64)
    config = ModelDatabaseConfig(num_cpus=0, snapshot_dir=tmp_path, snapshot_interval_s=3600)
    names = [f"model-database-v{number}:{key.model}:{'f' * 16}" for number in range(3)]
    for number, name in enumerate(names):
        actor = detached.get_or_create(ImpatientDatabaseActor, name, 0, {}, key, config)
        ray.get(actor.publish.remote(message(number, 3, key=key)), timeout=WAIT_S)
    assert set(stop("--model", key.model)) == {*names}
    (namespace,) = describe(tmp_path, key).namespaces
    assert (namespace.name, namespace.num_outputs) == ("n", 3)


class Earlier:
    """An actor of a version that does not say whether it could write."""

    def close(self) -> None:
        pass


def test_an_actor_that_does_not_say_whether_it_could_write(empty_cluster: None) -> None:
    name = f"model-database-v0:{uuid4().hex}:{'f' * 16}"
    detached.get_or_create(Earlier, name, 0, {})
    assert stop() == [name]


def test_which_of_several_clusters(empty_cluster: None) -> None:
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
