"""Choosing replicas that still respond."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import PendingRequest, RequestRouter

from deployments.watched_replica import WatchedReplica

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID, RunningReplicaInfo
    from ray.serve.request_router import RunningReplica

_MAX_SILENCE_S = 1.0
"""How long a replica may take to confirm that it has a request; normally milliseconds."""


class WatchfulRouter(RequestRouter):
    """Checks a silent replica before it gets another request.

    Ray Serve's routers ask a replica, for a tenth of a second, if they have not heard for ten
    seconds how many requests it has.  But their own requests count as news, so a frozen replica
    continues to get all requests of its sessions, until failed health checks have it replaced.
    What it was sent and has not confirmed goes to others (:mod:`deployments.watched_replica`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._silent_since_s: dict[ReplicaID, float] = {}
        """When the first request was sent to a replica that has said nothing since."""
        self._max_silence_s: float | None = None

    def initialize_state(self, **kwargs: Any) -> None:
        """Set up the router, as Ray Serve does with ``request_router_kwargs``.

        Args:
            max_silence_s: how long a replica may take to confirm a streaming request; without it,
                there is no limit.
        """
        self._max_silence_s = kwargs.pop("max_silence_s", None)
        super().initialize_state(**kwargs)  # type: ignore[no-untyped-call]

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """Return what requests are sent to a replica with."""
        return WatchedReplica(replica_info, self._max_silence_s)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **options: Any
    ) -> RunningReplica:
        latest_s = time.monotonic() - _MAX_SILENCE_S
        for replica, since_s in list(self._silent_since_s.items()):
            if since_s < latest_s:
                del self._silent_since_s[replica]
                self.on_replica_actor_unavailable(replica)  # what is known of it is outdated
        return await super()._choose_replica_for_request(pending_request, **options)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Start waiting for an answer."""
        super().on_send_request(replica_id)
        self._silent_since_s.setdefault(replica_id, time.monotonic())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Note that the replica has confirmed a request, or refused one."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._silent_since_s.pop(replica_id, None)

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """Note that an answer of the replica has ended."""
        super().decrement_queue_len_cache(replica_id)
        self._silent_since_s.pop(replica_id, None)
