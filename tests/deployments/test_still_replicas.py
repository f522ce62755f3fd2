"""A replica that stands still keeps no clients but those it had when it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from tests.clusters import connected_cluster
from tests.marked_processes import standing_still
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SESSION_ROUTER = {
    "request_router_class": "deployments.routers.SessionRouter",
    "request_router_kwargs": {"max_lead": 100},
}
LOAD_ROUTER = {"request_router_class": "deployments.routers.LoadRouter"}
WAIT_S = 20.0
PATIENCE_S = 2.0


class Which:
    """Says which process it is."""

    async def __call__(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with connected_cluster(2):
        serve.start(http_options={"port": free_port()})
        try:
            yield
        finally:
            serve.shutdown()


def unanswered_by(handle: DeploymentHandle[Any]) -> DeploymentResponse[Any]:
    """The first of several calls that is not answered soon."""
    while True:
        answer = handle.remote()
        try:
            answer.result(timeout_s=PATIENCE_S)
        except TimeoutError:
            return answer


@pytest.mark.parametrize("router", [SESSION_ROUTER, LOAD_ROUTER], ids=["session", "load"])
def test_a_replica_that_stands_still(router: dict[str, Any]) -> None:
    """Others answer for it a second later; when it goes on, it has its sessions again."""
    options: dict[str, Any] = {
        "num_replicas": 2,
        "max_ongoing_requests": 100,
        "request_router_config": router,
        "health_check_timeout_s": 300,
        "ray_actor_options": {"num_cpus": 0},
    }
    handle: DeploymentHandle[Any] = serve.run(
        serve.deployment(**options)(Which).bind(),
        name=router["request_router_class"][-11:],
        route_prefix=None,
    ).options(session_id="a session")
    pid = handle.remote().result(timeout_s=WAIT_S)
    with standing_still(pid):
        unanswered = unanswered_by(handle)
        others = {handle.remote().result(timeout_s=WAIT_S) for _ in range(8)}
        assert pid not in others
    assert unanswered.result(timeout_s=WAIT_S) == pid
    again = {handle.remote().result(timeout_s=WAIT_S) for _ in range(20)}
    assert pid in again
    assert router is LOAD_ROUTER or again == {pid}
