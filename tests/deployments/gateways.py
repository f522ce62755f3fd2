"""Gateways on clusters of their own, before models that tests make up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve

from deployments.gateway import gateway_deployment
from deployments.generation import ModelInfo
from deployments.runtime import actor_options
from hdserve.access import Access
from hdserve.config import GatewayConfig, ModelConfig, ServeConfig
from tests.clusters import connected_cluster
from tests.ports import free_port

INFO = ModelInfo("m", 1024, "float32", "cpu", False, True, 1, 1, 1, 0, 0, 0, (), "f")
"""What a model that is made up says it is."""


@contextmanager
def running_gateway(
    model: type, *, limits: GatewayConfig | None = None, **options: Any
) -> Iterator[str]:
    """Where a gateway of ``model``, whose name is ``m``, answers.

    Args:
        limits: of the gateway.
        options: of the model's deployment.
    """
    config = ServeConfig(
        models=(ModelConfig(name="m", model="m"),), gateway=limits or GatewayConfig()
    )
    port = free_port()
    deployment = serve.deployment(ray_actor_options=actor_options(0.1, 1000), **options)(model)
    with connected_cluster(2):
        try:
            serve.start(http_options={"port": port})
            serve.run(gateway_deployment(config, {"m": deployment.bind()}, Access()))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
