"""Replicas find pods, the autoscaler knows which to add, and pods may go."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import ray_constants
from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec

from hdserve.doctor.placement import Process, processes, unplaced
from tests.k8s.manifests import (
    OVERLAYS,
    Manifest,
    application_config,
    environment,
    groups,
    of_kind,
    ray_service,
    render,
    serve_config,
)

READ_BY_KUBERAY = {"cpu", "memory"}
"""Names, in any case, that KubeRay takes for another resource, like all that end in ``gpu``."""


def resources_of(group: Manifest) -> dict[str, float]:
    """What Ray's autoscaler takes a new pod of ``group`` to have."""
    found: dict[str, Any] = _get_ray_resources_from_group_spec(group, False)
    return found


def fitting(process: Process, service: Manifest) -> list[str]:
    """The groups on one of whose pods there is room for a process."""
    return [
        group["groupName"]
        for group in groups(service)[1:]
        if not unplaced([process], [resources_of(group)])
    ]


def running(overlay: str) -> list[Process]:
    """What the application starts: one process of each model at least."""
    config = application_config(ray_service(overlay))
    found = [*processes(config)]
    assert {process.owner for process in found} >= {model.name for model in config.models}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_processes_fit_one_group(overlay: str) -> None:
    """Each, so that it is known which pods are added for it, and every group has a process."""
    service = ray_service(overlay)
    found = [fitting(process, service) for process in running(overlay)]
    assert [len(names) for names in found] == [1] * len(found)
    assert {name for names in found for name in names} == {
        group["groupName"] for group in groups(service)[1:]
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_processes_run_where_their_group_says(overlay: str) -> None:
    """One without a GPU, a gateway or a database as well, never takes the place of one with, and
    looks for none."""
    service = ray_service(overlay)
    by_name = {group["groupName"]: resources_of(group) for group in groups(service)[1:]}
    for process in running(overlay):
        (name,) = fitting(process, service)
        wants_gpu = process.resources.get("GPU", 0) > 0
        assert wants_gpu == (by_name[name].get("GPU", 0) > 0)
        if process.model and not wants_gpu and any("GPU" in found for found in by_name.values()):
            assert process.model.engine.device == "cpu"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_model_that_reserves_a_gpu_runs_on_it(overlay: str) -> None:
    """Or not at all: with ``auto`` a replica whose PyTorch cannot use the GPU, as under an old
    driver, serves on the CPU of an expensive pod, and reports no error."""
    models = application_config(ray_service(overlay)).models
    reserving = [model for model in models if model.num_gpus]
    assert bool(reserving) == (overlay != "cpu-dev")
    assert {model.engine.device for model in reserving} <= {"cuda"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nobody_waits_for_what_the_cluster_has(overlay: str) -> None:
    """Pods with GPUs may come after the application was built, so each model says what it needs."""
    service = ray_service(overlay)
    if any("GPU" in resources_of(group) for group in groups(service)[1:]):
        for model in application_config(service).models:
            assert model.num_gpus is not None or model.engine.device == "cpu"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_fewest_pods_have_room(overlay: str) -> None:
    """For all that is started at first, on its own group's; gateways find room without one of
    them, where there is more than one of their group."""
    pods = [
        (group["groupName"], resources_of(group))
        for group in groups(ray_service(overlay))[1:]
        for _ in range(group["minReplicas"])
    ]
    assert unplaced(running(overlay), [resources for _, resources in pods]) == []
    gateways = [process for process in running(overlay) if process.owner == "the gateway"]
    names = [name for name, _ in pods]
    (group,) = fitting(gateways[0], ray_service(overlay))
    if overlay != "cpu-dev":
        assert names.count(group) > 1
        (_, other), *_ = (pod for pod in pods if pod[0] == group)
        assert unplaced(gateways, [other]) == []


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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_as_many_gateways_as_pods_of_their_group(overlay: str) -> None:
    """One on each: KubeRay takes a pod without a replica for one that is not ready, and then no
    other one may go."""
    service = ray_service(overlay)
    workers = groups(service)[1:]
    if sum(group["minReplicas"] for group in workers) == 1:
        return
    (application,) = serve_config(service)["applications"]
    (options,) = [each for each in application["deployments"] if each["name"] == "gateway"]
    assert options["max_replicas_per_node"] == 1
    gateways = [process for process in running(overlay) if process.owner == "the gateway"]
    (name,) = fitting(gateways[0], service)
    (group,) = [group for group in workers if group["groupName"] == name]
    assert len(gateways) == group["minReplicas"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workers_go_on_without_a_head(overlay: str) -> None:
    """For a day, where KubeRay would have all of them end after 600 s."""
    for group in groups(ray_service(overlay))[1:]:
        (container,) = group["template"]["spec"]["containers"]
        assert environment(container)["RAY_gcs_rpc_server_reconnect_timeout_s"] == "86400"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_worker_at_a_time_where_there_are_more(overlay: str) -> None:
    """Of those of all groups."""
    fewest = sum(group["minReplicas"] for group in groups(ray_service(overlay))[1:])
    budgets = of_kind(render(f"overlays/{overlay}"), "PodDisruptionBudget")
    wanted = [fewest - 1] if fewest > 1 else []
    assert [budget["spec"]["minAvailable"] for budget in budgets] == wanted
