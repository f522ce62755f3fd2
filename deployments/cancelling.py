"""Ending calls of model servers."""

from __future__ import annotations

from typing import Any


def cancel_stream(stream: Any) -> None:
    """End a streaming call of Ray Serve (``DeploymentResponseGenerator``), whatever it waits for.

    Its own ``cancel`` misses the turn of the event loop in which the call was assigned to a replica
    and nobody has awaited that yet: there is nothing to cancel any more on this side, the other
    side is not told, and it does nothing when it is called again.
    """
    stream.cancel()
    assigned = stream._replica_result_future
    if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()
