"""What KubeRay 1.7 refuses when it meets a RayService, beyond the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.k8s.manifests import Manifest, groups

MAX_NAME_LENGTH = 47
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")


def violations(service: Manifest) -> Iterator[str]:
    """One sentence for each rule that is broken."""
    yield from _of_metadata(service)
    yield from _of_fault_tolerance(service)
    yield from _of_autoscaling(service)
    for group in groups(service):
        yield from _of_group(group)
    spec = service["spec"]
    if spec.get("upgradeStrategy", {}).get("type", "NewCluster") not in UPGRADES:
        yield "unknown upgrade strategy"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "negative deletion delay"
    if spec["rayClusterConfig"].get("authOptions", {}).get("mode") == "token":
        major, minor, *_ = map(int, spec["rayClusterConfig"].get("rayVersion", "0.0").split("."))
        if (major, minor) < (2, 52):
            yield "token authentication needs rayVersion 2.52"


def _of_metadata(service: Manifest) -> Iterator[str]:
    name = service["metadata"]["name"]
    if len(name) > MAX_NAME_LENGTH or not DNS_1035.fullmatch(name):
        yield "the name is no DNS label, or too long"
    head_service = service["spec"]["rayClusterConfig"]["headGroupSpec"].get("headService", {})
    if head_service.get("metadata", {}).get("name"):
        yield "headService must have no name"


def _of_fault_tolerance(service: Manifest) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    annotations = service["metadata"].get("annotations", {})
    head = cluster["headGroupSpec"]
    environment = _environment(head)
    if "gcsFaultToleranceOptions" not in cluster:
        if "RAY_REDIS_ADDRESS" in environment:
            yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
        return
    if annotations.get("ray.io/ft-enabled"):
        yield "fault tolerance by annotation and by option"
    if annotations.get("ray.io/external-storage-namespace"):
        yield "storage namespace by annotation and by option"
    if {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & environment.keys():
        yield "Redis by environment and by option"
    if {"redis-password", "redis-username"} & head.get("rayStartParams", {}).keys():
        yield "Redis by start parameter and by option"


def _of_autoscaling(service: Manifest) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    is_enabled = cluster.get("enableInTreeAutoscaling", False)
    version = cluster.get("autoscalerOptions", {}).get("version")
    by_environment = _environment(cluster["headGroupSpec"]).get("RAY_enable_autoscaler_v2")
    if by_environment in ("1", "true") and not is_enabled:
        yield "autoscaler v2 by environment, without the autoscaler"
    if by_environment is not None and version is not None and is_enabled:
        yield "autoscaler version by environment and by option"
    for group in groups(service):
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        if is_enabled and version == "v2" and policy != "Never":
            yield "restartPolicy must be Never with autoscaler v2"
        if is_enabled and group.get("suspend"):
            yield "a group cannot be suspended with the autoscaler"


def _of_group(group: dict[str, Any]) -> Iterator[str]:
    if not group["template"]["spec"].get("containers"):
        yield "a group has no container"
    params = group.get("rayStartParams", {})
    if group.get("resources") and any(params.get(key) for key in RESOURCE_PARAMS):
        yield "resources by start parameter and by option"
    if "labels" in params:
        yield "labels by start parameter"
    if group.get("minReplicas", 0) > group.get("maxReplicas", 2**31 - 1):
        yield "minReplicas above maxReplicas"
    wanted = group.get("replicas", 0)
    if not group.get("minReplicas", 0) <= wanted <= group.get("maxReplicas", 2**31 - 1):
        yield "replicas outside minReplicas and maxReplicas"


def _environment(group: Manifest) -> dict[str, str]:
    (container, *_) = group["template"]["spec"]["containers"]
    return {item["name"]: item.get("value", "") for item in container.get("env", ())}
