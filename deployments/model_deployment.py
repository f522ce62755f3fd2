"""The Serve deployment of one model: its replicas, their resources, and how requests reach them."""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.replica.model_server import ModelServer
from deployments.routers import LoadRouter, SessionRouter
from deployments.runtime import actor_options
from hdserve.config import ModelConfig, ServeConfig
from hdserve.config.deployed import LARGEST_NUMBER, deployment_name, num_held

_NUM_OTHER_CALLS = 32
"""Concurrent calls of a full replica: those it refuses, and those that generate nothing."""


def model_deployment(config: ModelConfig, system: ServeConfig) -> serve.Application:
    """Return the Serve application of one model of ``system``.

    Only the engine decides how many requests wait: it counts sequences.  If Ray Serve held requests
    back from a full replica, that would be a second queue, in which calls for metrics and readiness
    would wait too.  So Ray Serve sends a replica more than it accepts, and Ray Serve's own queue is
    for requests that arrive at once or before there is a replica.

    Args:
        config: with what it reserves of a GPU.
    """
    assert config.num_gpus is not None
    router_options = {"max_silence_s": system.gateway.max_replica_silence_s}
    if config.session_affinity:
        router_options["max_lead"] = config.engine.max_num_sequences
    options: dict[str, Any] = {
        "name": deployment_name(config.name),
        "max_ongoing_requests": min(config.engine.max_num_open + _NUM_OTHER_CALLS, LARGEST_NUMBER),
        "max_queued_requests": num_held(config),
        "request_router_config": {
            "request_router_class": SessionRouter if config.session_affinity else LoadRouter,
            "request_router_kwargs": router_options,
        },
        "ray_actor_options": actor_options(
            config.num_cpus,
            system.gateway.max_body_bytes,
            num_gpus=config.num_gpus,
            resources=dict(config.resources),
        ),
        "health_check_period_s": 5,
        "graceful_shutdown_timeout_s": system.drain_timeout_s,
    }
    autoscaling = config.autoscaling_options
    if autoscaling is not None:
        options["autoscaling_config"] = autoscaling
    else:
        options["num_replicas"] = config.max_num_replicas
    deployment = serve.deployment(**options)(ModelServer)
    return deployment.bind(
        config,
        system.model_database,
        len(system.models),
        system.telemetry,
        system.statistics_root,
    )
