"""What serves no model can be kept off the nodes that do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from actors import detached
from actors.stop import stop_actors
from tests.clusters import connected_cluster, patiently
from tests.serving import ServedApplication
from tests.waiting import eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-tiny"
GROUP = "group-cpu"
WAIT_S = 120.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes, of which one has the resource."""
    with connected_cluster(2) as cluster:
        patiently(lambda: cluster.add_node(num_cpus=2, resources={GROUP: 1}))
        yield cluster


def shares() -> list[float]:
    """Of the resource, of each detached actor."""

    def assigned(_actor: object) -> float:
        return float(ray.get_runtime_context().get_assigned_resources().get(GROUP, 0))

    actors = [detached.get(name) for name in detached.names()]
    return ray.get([actor.__ray_call__.remote(assigned) for actor in actors], timeout=WAIT_S)


def test_gateways_and_databases_are_where_their_resource_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    """They reserve what the configuration says, two gateways, the model's database and that of
    statistics; also when these are started again by whoever asks for one that was stopped."""
    config = {
        "models": [{"name": MODEL, "model": MODEL}],
        "gateway": {"num_replicas": 2, "resources": {GROUP: 0.1}},
        "model_database": {"resources": {GROUP: 0.3}},
        "statistics_root": str(tmp_path),
    }
    with ServedApplication(tmp_path, config, cluster.address) as served:
        assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=1).usage
        eventually(lambda: len(detached.names()) == 2, WAIT_S, pause_s=0.2)
        assert shares() == [0.3, 0.3]
        left = pytest.approx(1 - 2 * 0.1 - 2 * 0.3)
        eventually(lambda: ray.available_resources().get(GROUP) == left, WAIT_S, pause_s=0.2)
        assert len(stop_actors().names) == 2
        eventually(lambda: len(detached.names()) == 2, WAIT_S, pause_s=0.2)
        assert shares() == [0.3, 0.3]
