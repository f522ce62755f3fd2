"""``python -m deployments.cluster_state ADDRESS``: what a Ray cluster has, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.autoscaler.v2.sdk import get_cluster_status

from hdserve.config.deployed import GATEWAY_DEPLOYMENT


def cluster_state(address: str) -> dict[str, Any]:
    """Return what each node has, and what of it is free; and if our application is already there,
    what Ray Serve says of those of its deployments that are not healthy.

    Raises:
        ConnectionError, RuntimeError: the cluster cannot be reached.
    """
    ray.init(address, configure_logging=False, log_to_driver=False)
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    messages: dict[str, str] | None = None
    for application in serve.status().applications.values():
        if GATEWAY_DEPLOYMENT in application.deployments:
            found = application.deployments.items()
            messages = {name: item.message for name, item in found if item.message}
    return {
        "nodes": [node.total_resources() for node in nodes],
        "free": [node.available_resources() for node in nodes],
        "deployed": messages,
    }


if __name__ == "__main__":
    print(json.dumps(cluster_state(sys.argv[1])))
