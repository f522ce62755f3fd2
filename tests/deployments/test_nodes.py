"""Models that leave it to the cluster reserve the GPUs that its nodes have."""

from __future__ import annotations

from typing import Any

import pytest

from deployments import app
from deployments.application import AppArgs
from deployments.nodes import all_resources
from tests.clusters import local_ray


def reserved(*models: dict[str, Any]) -> list[float]:
    """The GPUs of each deployment of a model, in an application that is built now."""
    named = [{"name": f"m{n}", "model": "hdserve-mini", **model} for n, model in enumerate(models)]
    gateway: Any = app(AppArgs(config={"models": named}))._bound_deployment
    _, applications, _ = gateway.init_args
    found = [application._bound_deployment for application in applications.values()]
    return [deployment.ray_actor_options["num_gpus"] for deployment in found]


@pytest.mark.ray
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_gpus_of_the_cluster(num_gpus: int, caplog: pytest.LogCaptureFixture) -> None:
    """Ray counts as many as it is told: there need be none.  If one is not enough for all models,
    that is told once, and none of them has it."""
    with local_ray(num_gpus):
        assert sum(node.get("GPU", 0) for node in all_resources()) == num_gpus
        assert reserved({}) == [num_gpus]
        assert reserved({"engine": {"device": "cpu"}}) == [0]
        assert reserved({"num_gpus": 0.5}) == [0.5]
        assert not told(caplog)
        assert reserved({}, {}) == [0, 0]
    assert len(told(caplog)) == num_gpus
    for message in told(caplog):
        assert message.startswith("m0, m1: on the CPU, since num_gpus is left out")
        assert "; to mend it: num_gpus: 0.5" in message


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the builder has logged."""
    ours = [record for record in caplog.records if record.name == "deployments.application"]
    return [record.getMessage() for record in ours]


def test_before_ray_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve run` builds it: those of this machine that are visible count."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert all_resources() == [{"GPU": 0}]
    assert reserved({}) == [0]
