"""Replicas find pods, the autoscaler knows which to add, and pods may go."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import ray_constants
from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec

from hdserve.config import ModelConfig
from tests.k8s.manifests import (
    OVERLAYS,
    Manifest,
    application_config,
    environment,
    groups,
    of_kind,
    ray_service,
    render,
)

READ_BY_KUBERAY = {"cpu", "memory"}
"""Names, in any case, that KubeRay takes for another resource, like all that end in ``gpu``."""


def resources_of(group: Manifest) -> dict[str, float]:
    """What Ray's autoscaler takes a new pod of ``group`` to have."""
    found: dict[str, Any] = _get_ray_resources_from_group_spec(group, False)
    return found


def wanted_by(model: ModelConfig) -> dict[str, float]:
    """What a replica asks Ray for."""
    return {"CPU": model.num_cpus, "GPU": model.num_gpus, **model.resources}


def fitting(model: ModelConfig, service: Manifest) -> list[str]:
    """The groups on one of whose pods a replica has room."""
    return [
        group["groupName"]
        for group in groups(service)[1:]
        if all(num <= resources_of(group).get(name, 0) for name, num in wanted_by(model).items())
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_fit_one_group(overlay: str) -> None:
    """Each, so that it is known which pods are added for it, and every group has a model."""
    service = ray_service(overlay)
    found = [fitting(model, service) for model in application_config(service).models]
    assert [len(names) for names in found] == [1] * len(found)
    assert {name for names in found for name in names} == {
        group["groupName"] for group in groups(service)[1:]
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_models_run_where_their_group_says(overlay: str) -> None:
    """One without a GPU never takes the place of one with, and looks for none."""
    service = ray_service(overlay)
    by_name = {group["groupName"]: resources_of(group) for group in groups(service)[1:]}
    for model in application_config(service).models:
        (name,) = fitting(model, service)
        assert (model.num_gpus > 0) == (by_name[name].get("GPU", 0) > 0)
        if not model.num_gpus and any("GPU" in resources for resources in by_name.values()):
            assert model.engine.device == "cpu"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_keep_their_names(overlay: str) -> None:
    """KubeRay starts Ray with what the autoscaler reads."""
    for group in groups(ray_service(overlay)):
        for name in group.get("resources", {}):
            assert name.lower() not in READ_BY_KUBERAY
            assert not name.lower().endswith("gpu")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_streams_end_before_the_pod(overlay: str) -> None:
    """A replica has ``drain_timeout_s``; Ray drains its node for longer, so that another may start
    before; and Kubernetes waits until Ray is done."""
    assert hasattr(ray_constants, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    service = ray_service(overlay)
    drain_timeout_s = application_config(service).drain_timeout_s
    for group in groups(service)[1:]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        window_s = float(environment(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain_timeout_s + 30 <= window_s
        assert window_s + 20 <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_node_can_be_drained(overlay: str) -> None:
    """Of the fewest workers there are, one may go: a budget that is counted from what the owner of
    the pods wants would let none, because a RayCluster does not tell."""
    workers = groups(ray_service(overlay))[1:]
    for budget in of_kind(render(f"overlays/{overlay}"), "PodDisruptionBudget"):
        spec = budget["spec"]
        selected = [
            group
            for group in workers
            if spec["selector"]["matchLabels"].items()
            <= group["template"]["metadata"]["labels"].items()
        ]
        assert selected
        assert "maxUnavailable" not in spec
        assert isinstance(spec["minAvailable"], int)
        assert 0 < spec["minAvailable"] < sum(group["minReplicas"] for group in selected)


def test_one_worker_at_a_time_where_there_are_more() -> None:
    assert of_kind(render("overlays/multi-model"), "PodDisruptionBudget")
