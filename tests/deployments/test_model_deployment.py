"""What Ray Serve is told of a model."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private.accelerators import RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR
from ray.serve.config import AutoscalingConfig as RayAutoscalingConfig

from deployments.gateway import gateway_deployment
from deployments.model_deployment import model_deployment
from hdserve.access import Access
from hdserve.config import AutoscalingConfig, ServeConfig, parse_config
from hdserve.doctor.gpus import with_gpus


def configured(data: dict[str, Any]) -> ServeConfig:
    """As on a cluster without GPUs."""
    return with_gpus(parse_config(data), ())


def deployment(**fields: Any) -> Any:
    model = {"name": "a", "model": "hdserve-tiny", **fields}
    config = configured({"models": [model]})
    return model_deployment(config.models[0], config)._bound_deployment


def test_a_full_replica_can_still_be_asked() -> None:
    """Ray Serve lets a replica have more calls than its engine takes sequences."""
    found = deployment(engine={"max_num_sequences": 4, "max_num_queued": 6}, num_replicas=3)
    assert found._deployment_config.max_ongoing_requests > 10
    assert found._deployment_config.max_queued_requests == 30
    assert found.num_replicas == 3


def test_ray_serve_is_told_no_larger_number_than_it_can_count() -> None:
    """Its messages have 32 bits for each."""
    config = configured({"models": [{"name": "a", "model": "hdserve-tiny"}]})
    engine = config.models[0].engine.model_copy(update={"max_num_queued": 2**31})
    huge = config.models[0].model_copy(update={"engine": engine})
    application: Any = model_deployment(huge, config)
    options = application._bound_deployment._deployment_config
    assert options.max_ongoing_requests == options.max_queued_requests == 2**31 - 1
    assert options.to_proto_bytes()


@pytest.mark.parametrize(
    ("max_body_bytes", "num_bytes"),
    [(2**20, 64 * 2**20), (32 * 2**20, 256 * 2**20), (2**31, 2**31 - 1)],
)
def test_whatever_the_gateway_takes_can_be_passed_on(max_body_bytes: int, num_bytes: int) -> None:
    """The messages of both sides have room for the longest body, whatever is made of it."""
    config = configured(
        {
            "models": [{"name": "a", "model": "hdserve-tiny"}],
            "gateway": {"max_body_bytes": max_body_bytes},
        }
    )
    model: Any = model_deployment(config.models[0], config)
    gateway: Any = gateway_deployment(config, {}, Access())
    for application in (model, gateway):
        options = application._bound_deployment.ray_actor_options
        found = options["runtime_env"]["env_vars"]["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]
        assert found == str(num_bytes)


@pytest.mark.parametrize("num_gpus", [0, 0.5, 1])
def test_who_reserves_no_gpu_sees_none(num_gpus: float) -> None:
    """By default Ray shows it all GPUs of its node, of which ``device: auto`` would take the first
    one, whose memory may be another replica's."""
    options = deployment(num_gpus=num_gpus).ray_actor_options
    assert options["num_gpus"] == num_gpus
    assert options["runtime_env"]["env_vars"][RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO_ENV_VAR] == "1"


NOT_OFFERED = {"metrics_interval_s"} | {
    f"{kind}smoothing_factor" for kind in ("", "upscale_", "downscale_")
}
"""Ray has others in their place."""


def test_autoscaling_is_that_of_ray_serve() -> None:
    """Every field it documents with its default, and the values it is given; as many requests are
    aimed at as keep a replica's slots busy."""
    fields = RayAutoscalingConfig.model_fields
    assert AutoscalingConfig.model_fields.keys() == fields.keys() - NOT_OFFERED
    plain = RayAutoscalingConfig(**AutoscalingConfig().model_dump(exclude_none=True))
    assert plain == RayAutoscalingConfig()
    policy = {"policy_function": "json:JSONEncoder", "policy_kwargs": {"indent": 1}}
    chosen: dict[str, Any] = {
        "min_replicas": 2,
        "max_replicas": 9,
        "aggregation_function": "max",
        "policy": policy,
    }
    found = deployment(autoscaling=chosen, engine={"max_num_sequences": 4, "max_num_queued": 6})
    assert found._deployment_config.max_queued_requests == 90
    scaled = found._deployment_config.autoscaling_config
    assert scaled == RayAutoscalingConfig(**chosen, target_ongoing_requests=3.0)
    asked = deployment(autoscaling={**chosen, "target_ongoing_requests": 7.5})
    assert asked._deployment_config.autoscaling_config.target_ongoing_requests == 7.5


def test_requests_of_a_conversation_prefer_a_replica_where_it_pays() -> None:
    """Our router is used with ``session_affinity`` alone."""

    def router(**fields: Any) -> Any:
        return deployment(**fields)._deployment_config.request_router_config

    kept = router(session_affinity=True)
    assert kept.request_router_kwargs["max_lead"] > 0
    assert kept.request_router_class.endswith("SessionRouter")
    assert "max_lead" not in router(session_affinity=False).request_router_kwargs


@pytest.mark.parametrize("session_affinity", [True, False])
def test_every_router_knows_how_long_a_replica_may_be_silent(session_affinity: bool) -> None:
    """As the gateway does."""
    config = configured(
        {
            "models": [
                {"name": "a", "model": "hdserve-tiny", "session_affinity": session_affinity}
            ],
            "gateway": {"max_replica_silence_s": 7},
        }
    )
    model: Any = model_deployment(config.models[0], config)
    options = model._bound_deployment._deployment_config.request_router_config
    assert options.request_router_kwargs["max_silence_s"] == 7


@pytest.mark.parametrize(("gateway", "wanted"), [({}, -1), ({"max_queued_requests": 7}, 7)])
def test_as_many_requests_wait_for_a_gateway_as_configured(
    gateway: dict[str, int], wanted: int
) -> None:
    """All of them by default; what is refused is told to come back."""
    models = [{"name": "a", "model": "hdserve-tiny"}]
    config = configured({"models": models, "gateway": gateway})
    options = gateway_deployment(config, {}, Access())._bound_deployment._deployment_config
    assert options.max_queued_requests == wanted
    assert options.backpressure_config.status_code == 429
    assert options.backpressure_config.retry_after_s
