"""``hdserve doctor`` asks a Ray cluster what its nodes have free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from hdserve.config import ServeConfig, parse_config
from hdserve.config.deployed import GATEWAY_DEPLOYMENT
from hdserve.doctor.capacity import compare_with_cluster
from hdserve.doctor.cluster import read_cluster
from tests.clusters import connected_cluster, patiently
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes, of which one has a resource of its own; this process is connected."""
    with connected_cluster(1) as cluster:
        patiently(lambda: cluster.add_node(num_cpus=2, resources={"rack": 1}))
        try:
            yield cluster
        finally:
            serve.shutdown()


def configured(num_cpus: float, rack: float) -> ServeConfig:
    model = {
        "name": "m",
        "model": "hdserve-mini",
        "num_cpus": num_cpus,
        "resources": {"rack": rack},
    }
    return parse_config({"models": [model]})


def verdicts(config: ServeConfig, cluster: Cluster) -> list[str]:
    found = read_cluster(cluster.address)
    assert found is not None
    assert sum(node["CPU"] for node in found.nodes) == 3
    return [finding.verdict.value for finding in compare_with_cluster(config, found)]


@ray.remote(num_cpus=0.5, resources={"rack": 0.5})
class Tenant:
    """Of somebody else."""

    def is_there(self) -> bool:
        return True


@serve.deployment(name=GATEWAY_DEPLOYMENT, ray_actor_options={"num_cpus": 0.1})
class Gateway:
    pass


def test_free_resources_of_a_cluster(cluster: Cluster) -> None:
    """What others have reserved is not free; of an application that is there Ray Serve speaks."""
    assert verdicts(configured(2, 1), cluster) == ["ok"]
    assert verdicts(configured(2.5, 1), cluster) == ["warning"]
    tenant = Tenant.remote()  # type: ignore[attr-defined]
    assert ray.get(tenant.is_there.remote(), timeout=WAIT_S)
    assert verdicts(configured(1.5, 0.5), cluster) == ["ok"]
    assert verdicts(configured(1.5, 0.6), cluster) == ["warning"]
    serve.run(Gateway.bind())
    assert verdicts(configured(1.5, 0.6), cluster) == ["ok"]
