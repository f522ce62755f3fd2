"""What several tests of the actors run with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray

from actors import detached
from hdserve.config import ModelDatabaseConfig
from tests.actors.listeners import Listener
from tests.actors.statistics_directories import make_database
from tests.clusters import local_ray
from tests.waiting import WAIT_S


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """One real Ray cluster; it ends with the package, as other tests start their own."""
    with local_ray():
        yield


@pytest.fixture
def holder_and_waiting(ray_cluster: None) -> Iterator[tuple[Any, Any]]:
    """A listener that is there, and one that has no room until the first is gone."""
    names = {name for name in ray.cluster_resources() if name.startswith("node:")}
    (node,) = names - {"node:__internal_head__"}
    holder, waiting = f"holder-{uuid4().hex}", f"waiting-{uuid4().hex}"
    placed = [detached.get_or_create(Listener, holder, 0, {node: 1})]
    ray.get(placed[0].told.remote(), timeout=WAIT_S)  # of two that wait, either may be the first
    placed.append(detached.get_or_create(Listener, waiting, 0, {node: 1}))
    yield placed[0], placed[1]
    for actor in placed:
        ray.kill(actor)


@pytest.fixture
def config(tmp_path: Path) -> ModelDatabaseConfig:
    """Of an actor that writes its snapshots when it ends, or is told to."""
    return ModelDatabaseConfig(snapshot_dir=tmp_path, snapshot_interval_s=3600)


@pytest.fixture
def fingerprint() -> str:
    """Of a tokenizer that no other test has."""
    return uuid4().hex


@pytest.fixture
def database(tmp_path: Path, fingerprint: str) -> Path:
    return make_database(tmp_path / "database", fingerprint)
