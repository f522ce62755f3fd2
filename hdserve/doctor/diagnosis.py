"""All checks, in the order in which a server needs what they check."""

from __future__ import annotations

from collections.abc import Iterator

from hdserve.config import ServeConfig
from hdserve.config.deployed import DeployedConfig
from hdserve.doctor.cluster import Cluster, is_own, read_cluster
from hdserve.doctor.configuration import (
    check_access,
    check_gpus,
    check_memory,
    check_model_database,
    check_paths,
    check_placement,
    check_settings,
    check_telemetry,
)
from hdserve.doctor.finding import Finding
from hdserve.doctor.gpus import on_its_device, with_gpus
from hdserve.doctor.machine import (
    check_cluster,
    check_packages,
    check_port,
    check_python,
    check_ray,
    hdserve_answers,
)
from hdserve.doctor.model import check_compiler, check_device, check_model, check_weights


def diagnose(deployed: DeployedConfig, port: int, ray_address: str) -> Iterator[Finding]:
    """Check everything that ``serve run deployments:app`` needs, in the order in which it needs
    it.

    Args:
        ray_address: of the cluster to run on; empty to start one.
    """
    config = deployed.config
    yield from check_python()
    yield from check_packages()
    yield from check_ray()
    yield from check_cluster(ray_address)
    cluster = read_cluster(ray_address)
    placed = as_placed(deployed, cluster)
    is_serving = hdserve_answers(port) or (cluster is not None and cluster.deployed is not None)
    yield from check_placement(placed, cluster, ray_address)
    yield from check_gpus(deployed.built, cluster)
    if is_own(ray_address) and not is_serving:
        yield from check_memory(placed)
    yield from check_paths(config, ray_address)
    yield from check_port(port)
    yield from check_access(config)
    yield from check_model_database(config)
    yield from check_telemetry(config)
    yield from check_settings(config)
    for model in placed.models:
        yield from check_device(model, is_elsewhere=not is_own(ray_address))
        if not is_serving:
            yield from check_weights(model, is_elsewhere=not is_own(ray_address))
        yield from check_compiler(model)
        yield from check_model(model)


def as_placed(deployed: DeployedConfig, cluster: Cluster | None) -> ServeConfig:
    """Return the configuration with the device of each model as its replicas have it, which is
    decided where the application is built."""
    built = with_gpus(deployed.built, cluster.nodes if cluster else ())
    models = [
        on_its_device(model.model_copy(update={"num_gpus": decided.num_gpus}))
        for model, decided in zip(deployed.config.models, built.models, strict=True)
    ]
    return deployed.config.model_copy(update={"models": tuple(models)})
