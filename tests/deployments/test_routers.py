"""Requests that are cancelled while no replica is there leave nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from unittest.mock import patch

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from deployments.routers import LoadRouter, SessionRouter


class Opaque:
    """Arguments of a request, which nobody has to compare."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("requests are told apart by what they say")

    __hash__ = object.__hash__


@pytest.mark.parametrize("kind", [LoadRouter, SessionRouter])
def test_who_is_gone_is_forgotten(kind: type[RequestRouter]) -> None:
    asyncio.run(forget(kind))


async def forget(kind: type[RequestRouter]) -> None:
    with patch("ray.util.metrics.Gauge.set"):  # there is no Ray
        router = kind(
            deployment_id=DeploymentID("m", "a"),
            handle_source=DeploymentHandleSource.REPLICA,
            self_actor_id="a",
            self_node_id="n",
            use_replica_queue_len_cache=True,
        )
        requests = [
            PendingRequest([Opaque()], {}, RequestMetadata(str(number), str(number)))
            for number in range(3)
        ]
        waiting = [
            asyncio.create_task(router._choose_replica_for_request(request)) for request in requests
        ]
        await asyncio.sleep(0)
        assert router.num_pending_requests == 3
        for task in waiting[1::-1]:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for left in (router._pending_requests_to_fulfill, router._pending_requests_to_route):
            assert [*map(id, left)] == [id(requests[2])]
        waiting[2].cancel()
