"""All checks, in the order in which a server needs what they check."""

from __future__ import annotations

from collections.abc import Iterator

from hdserve.config import ServeConfig
from hdserve.doctor.configuration import (
    check_access,
    check_model_database,
    check_paths,
    check_placement,
    check_settings,
    check_telemetry,
)
from hdserve.doctor.finding import Finding
from hdserve.doctor.machine import (
    check_cluster,
    check_packages,
    check_port,
    check_python,
    check_ray,
)
from hdserve.doctor.model import check_compiler, check_device, check_model


def diagnose(config: ServeConfig, port: int, ray_address: str) -> Iterator[Finding]:
    """Check everything that ``serve run deployments:app`` needs, in the order in which it needs
    it.

    Args:
        ray_address: of the cluster to run on; empty to start one.
    """
    yield from check_python()
    yield from check_packages()
    yield from check_ray()
    yield from check_cluster(ray_address)
    yield from check_placement(config, ray_address)
    yield from check_paths(config, ray_address)
    yield from check_port(port)
    yield from check_access(config)
    yield from check_model_database(config)
    yield from check_telemetry(config)
    yield from check_settings(config)
    for model in config.models:
        yield from check_device(model)
        yield from check_compiler(model)
        yield from check_model(model)
