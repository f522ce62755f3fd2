"""What Ray Serve is told of a model."""

from __future__ import annotations

from typing import Any

from deployments.model_deployment import model_deployment
from hdserve.config import parse_config


def deployment(**fields: Any) -> Any:
    model = {"name": "a", "model": "hdserve-tiny", **fields}
    config = parse_config({"models": [model]})
    return model_deployment(config.models[0], config)._bound_deployment


def test_a_full_replica_can_still_be_asked() -> None:
    """Ray Serve lets a replica have more calls than its engine takes sequences."""
    found = deployment(engine={"max_num_sequences": 4, "max_num_queued": 6}, num_replicas=3)
    assert found._deployment_config.max_ongoing_requests > 10
    assert found._deployment_config.max_queued_requests == 30
    assert found.num_replicas == 3


def test_requests_of_a_conversation_prefer_a_replica_where_it_pays() -> None:
    """Our router is used with ``session_affinity`` alone."""

    def router(**fields: Any) -> Any:
        return deployment(**fields)._deployment_config.request_router_config

    kept = router(session_affinity=True)
    assert kept.request_router_kwargs["max_lead"] > 0
    assert kept.request_router_class.endswith("SessionRouter")
    assert not router(session_affinity=False).request_router_kwargs
