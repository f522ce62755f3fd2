"""Replicas that lose the requests they do not confirm."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError
from ray.serve.request_router import PendingRequest, RunningReplica

if TYPE_CHECKING:
    from ray.serve._private.common import ReplicaQueueLengthInfo, RunningReplicaInfo


class WatchedReplica(RunningReplica):
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
