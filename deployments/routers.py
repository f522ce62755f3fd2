"""Which replica of a model gets a request: one that responds, and if it can be, one that knows the
conversation."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaID, ReplicaQueueLengthInfo, RunningReplicaInfo

_MAX_SILENCE_S = 1.0
"""How long a replica may take to confirm that it has a request; normally milliseconds."""


class CarefulRouter(RequestRouter):
    """Checks a silent replica before it gets another request, and forgets who is gone.

    Ray Serve's routers ask a replica, for a tenth of a second, if they have not heard for ten
    seconds how many requests it has.  But their own requests count as news, so a frozen replica
    continues to get all requests of its sessions, until failed health checks have it replaced.
    What it was sent and has not confirmed goes to others (:class:`_WatchedReplica`).

    A request that is cancelled while it waits for a replica is removed from the queues.  Ray
    Serve's routers only drop it when a replica takes the next one; while there is no replica they
    keep all of them, with everything they hold.
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
        return _WatchedReplica(replica_info, self._max_silence_s)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **options: Any
    ) -> RunningReplica:
        latest_s = time.monotonic() - _MAX_SILENCE_S
        for replica, since_s in list(self._silent_since_s.items()):
            if since_s < latest_s:
                del self._silent_since_s[replica]
                self.on_replica_actor_unavailable(replica)  # what is known of it is outdated
        try:
            return await super()._choose_replica_for_request(pending_request, **options)
        except asyncio.CancelledError:
            for waiting in (self._pending_requests_to_fulfill, self._pending_requests_to_route):
                _remove(waiting, pending_request)
            raise

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


def _remove(waiting: deque[PendingRequest], gone: PendingRequest) -> None:
    """Remove exactly this request: comparing the fields of all others took 3.8 s of a gateway's
    time when 4,000 were cancelled."""
    for index, request in enumerate(waiting):
        if request is gone:
            del waiting[index]
            return


class _WatchedReplica(RunningReplica):
    """A replica that has ``max_silence_s`` to confirm that it has a streaming request; ``None`` is
    no limit.  Ray Serve gives one that was not confirmed to another replica: nothing of its answer
    was sent.

    By itself Ray Serve waits until the connection fails, which that to a node that has vanished
    does minutes later.  Other calls are confirmed by their answer, so they are not watched.
    """

    def __init__(self, replica_info: RunningReplicaInfo, max_silence_s: float | None) -> None:
        super().__init__(replica_info)
        self._max_silence_s = max_silence_s

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        """Send a request, and return what stands for its answer."""
        result = super().try_send_request(pr, with_rejection=with_rejection)
        if not pr.metadata.is_streaming:
            return result
        return _WatchedResult(result, self.actor_id.binary(), self._max_silence_s)


class _WatchedResult:
    """A ``ReplicaResult`` that is not waited for without end."""

    def __init__(self, result: Any, actor_id: bytes, max_silence_s: float | None) -> None:
        self._result = result
        self._actor_id = actor_id
        self._max_silence_s = max_silence_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        """Return whether the replica takes the request.

        Raises:
            ActorUnavailableError: it has not said so in time; it is told to forget the request.
        """
        try:
            async with asyncio.timeout(self._max_silence_s):
                said: ReplicaQueueLengthInfo = await self._result.get_rejection_response()
        except TimeoutError as error:
            reason = f"it has not confirmed a request in {self._max_silence_s:g} s"
            raise ActorUnavailableError(reason, self._actor_id) from error
        return said


class LoadRouter(CarefulRouter, PowerOfTwoChoicesRequestRouter):
    """Chooses the less busy of two replicas, as Ray Serve does by default."""


class SessionRouter(CarefulRouter, ConsistentHashRouter):
    """Ray Serve's consistent hashing of sessions, aware of load.

    What a replica learned of a conversation, its context and its running output, is nowhere else,
    so later turns are drafted better where the earlier ones were.  This is a preference: a replica
    that is full, gone, silent or a whole batch behind the others is passed over, and the answer is
    the same on any replica.

    Replicas come and go without moving the sessions of the others, and every gateway finds the same
    replica without asking anybody.  Requests without a session go to the less busy of two.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Set up the router, as Ray Serve does with ``request_router_kwargs``.

        Args:
            max_lead: how many requests more than the least busy replica the preferred one may have.
            max_silence_s: see :class:`CarefulRouter`.
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
        gateway knows.  One it has not heard of lately may have none: it is asked, before it gets a
        request."""
        lengths = self.replica_queue_len_cache
        own = lengths.get(replica.replica_id) or 0
        least = min(lengths.get(other.replica_id) or 0 for other in others)
        return own - least > self._max_lead
