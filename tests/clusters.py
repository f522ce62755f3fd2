"""Ray clusters that the process of the tests is connected to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import ray
from ray.cluster_utils import Cluster

Started = TypeVar("Started")


@contextmanager
def connected_cluster(num_cpus: int, num_gpus: int = 0) -> Iterator[Cluster]:
    """A head node without a dashboard, for servers in other processes, too; what they count is on
    Ray's port a second later, not ten.  The GPUs need not exist."""
    node = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "include_dashboard": False,
        "_system_config": {"metrics_report_interval_ms": 1000},
    }
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=node))
    try:
        ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def local_ray(num_gpus: int = 0) -> Iterator[None]:
    """Two CPUs for actors of this process, and as many GPUs, which need not exist.

    A local ``ray.init`` turns token authentication on for the rest of the process, which clusters
    of later tests would inherit.
    """
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        patiently(
            lambda: ray.init(
                "local",
                num_cpus=2,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=100 * 2**20,
            )
        )
        try:
            yield
        finally:
            ray.shutdown()


def patiently(start: Callable[[], Started]) -> Started:
    """Start a node once more if it took longer than the 30 s that Ray waits, on a machine that does
    other things, too."""
    try:
        return start()
    except Exception as error:  # Ray has no type of its own for it
        if "timed out during startup" not in str(error):
            raise
        return start()
