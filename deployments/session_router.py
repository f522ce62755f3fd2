"""Which replica of a model gets a request: the one that knows its conversation, unless it is busy.

What a replica learned of a conversation, its context and its running output, is nowhere else, so
later turns are drafted better where the earlier ones were.  This is a preference: a replica that is
full, gone, silent or a whole batch behind the others is passed over, and the answer is the same on
any replica.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.forgetful_router import ForgetfulRouter
from deployments.watchful_router import WatchfulRouter


class SessionRouter(ForgetfulRouter, WatchfulRouter, ConsistentHashRouter):
    """Ray Serve's consistent hashing of sessions, aware of load.

    Replicas come and go without moving the sessions of the others, and every gateway finds the same
    replica without asking anybody.  Requests without a session go to the less busy of two.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Set up the router, as Ray Serve does with ``request_router_kwargs``.

        Args:
            max_lead: how many requests more than the least busy replica the preferred one may have.
            max_silence_s: see :class:`~deployments.watchful_router.WatchfulRouter`.
        """
        self._max_lead: int = kwargs.pop("max_lead")
        super().initialize_state(**kwargs)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas in ranks: those of a rank are tried before those of the next."""
        ranks: list[list[RunningReplica]] = await super().choose_replicas(
            candidate_replicas, pending_request
        )
        if len(candidate_replicas) < 2 or pending_request is None:
            return ranks
        two = random.sample(candidate_replicas, 2)
        if not pending_request.metadata.session_id:
            return [two]
        if ranks and self._is_behind(ranks[0][0], candidate_replicas):
            return [*ranks[1:], two, ranks[0]]
        return [*ranks, two]

    def _is_behind(self, replica: RunningReplica, others: list[RunningReplica]) -> bool:
        """Whether ``replica`` has too many requests more than the least busy one, as far as this
        gateway knows."""
        lengths = self.replica_queue_len_cache
        own = lengths.get(replica.replica_id)
        known = [lengths.get(other.replica_id) for other in others]
        least = min((length for length in known if length is not None), default=0)
        return own is not None and own - least > self._max_lead
