"""Requests that are cancelled while no replica is there leave nothing behind; a session goes where
it went before, unless others have far less to do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest, RequestRouter

from deployments.routers import LoadRouter, SessionRouter


class Opaque:
    """Arguments of a request, which nobody has to compare."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("requests are told apart by what they say")

    __hash__ = object.__hash__


def make_router(kind: type[RequestRouter]) -> Any:
    return kind(
        deployment_id=DeploymentID("m", "a"),
        handle_source=DeploymentHandleSource.REPLICA,
        self_actor_id="a",
        self_node_id="n",
        use_replica_queue_len_cache=True,
    )


@pytest.mark.parametrize("kind", [LoadRouter, SessionRouter])
def test_who_is_gone_is_forgotten(kind: type[RequestRouter]) -> None:
    asyncio.run(forget(kind))


async def forget(kind: type[RequestRouter]) -> None:
    with patch("ray.util.metrics.Gauge.set"):  # there is no Ray
        router = make_router(kind)
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


@pytest.mark.parametrize(
    ("own", "others", "is_preferred"),
    [
        (None, None, True),
        (16, None, True),
        (17, None, False),
        (17, 0, False),
        (17, 1, True),
    ],
)
def test_a_replica_a_batch_behind_is_passed_over(
    own: int | None, others: int | None, is_preferred: bool
) -> None:
    """Also where the gateway has not heard of the others for a while, as they were not asked."""
    asyncio.run(choose(own, others, is_preferred))


async def choose(own: int | None, others: int | None, is_preferred: bool) -> None:
    with patch("ray.util.metrics.Gauge.set"):
        router = make_router(SessionRouter)
        router.initialize_state(max_lead=16, max_silence_s=30.0)
        ids = [ReplicaID(str(number), DeploymentID("m", "a")) for number in range(3)]
        replicas = {each: SimpleNamespace(replica_id=each) for each in ids}
        router._replicas = replicas
        router._rebuild_ring(frozenset(ids))
        request = PendingRequest([], {}, RequestMetadata("r", "r", session_id="s"))
        candidates = [*replicas.values()]
        ((preferred,), *_) = await router.choose_replicas(candidates, request)
        for each in ids:
            length = own if each == preferred.replica_id else others
            if length is not None:
                router.replica_queue_len_cache.update(each, length)
        ((first, *_), *_) = await router.choose_replicas(candidates, request)
        assert (first is preferred) == is_preferred
