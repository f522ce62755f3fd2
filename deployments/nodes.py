"""What the nodes have on which an application is placed.

``python -m deployments.nodes``: what Ray will count on this machine if it starts here, as JSON.
"""

from __future__ import annotations

import json

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.utils import get_num_cpus

from hdserve.doctor.placement import Resources


def all_resources() -> list[Resources]:
    """Return all resources of each node of the cluster, reserved or not.

    ``serve run`` joins a cluster, or starts one, only when the application is built: until then
    these are the GPUs of this machine, as Ray will count them if it starts here.
    """
    if ray.is_initialized():
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        return [node["Resources"] for node in nodes if node["Alive"]]
    return [{"GPU": _num_own_gpus()}]


def own_resources() -> Resources:
    """Return the resources of this machine as Ray will count them if it starts here: CPUs by the
    limits of the container, whatever this process may run on."""
    return {"CPU": get_num_cpus(override_docker_cpu_warning=True), "GPU": _num_own_gpus()}


def _num_own_gpus() -> int:
    manager = get_accelerator_manager_for_resource("GPU")
    assert manager is not None
    number = manager.get_current_node_num_accelerators()
    visible = manager.get_current_process_visible_accelerator_ids()
    return number if visible is None else min(number, len(visible))


if __name__ == "__main__":
    print(json.dumps(own_resources()))
