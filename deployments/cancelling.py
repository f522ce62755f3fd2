"""Ending calls of model servers, and what Ray Serve knows of them without saying so."""

from __future__ import annotations

from typing import Any


def cancel_stream(stream: Any) -> None:
    """End a streaming call of Ray Serve (``DeploymentResponseGenerator``), whatever it waits for.

    Its own ``cancel`` misses one case: the call was assigned to a replica in this turn of the event
    loop, and nobody has awaited that yet.  Then there is nothing left to cancel on this side, the
    other side is not told, and calling it again does nothing.
    """
    stream.cancel()
    assigned = stream._replica_result_future
    if is_assigned(stream) and not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()


def is_given_up(handle: Any) -> bool:
    """Return whether Ray Serve has given up, or removed, the deployment of a handle that was
    called: it refuses further calls, but says nothing to those that wait for a replica."""
    is_available: bool = handle._router._asyncio_router._deployment_available
    return not is_available


def is_assigned(stream: Any) -> bool:
    """Return whether a replica has confirmed that it has the call, or there will never be one."""
    is_done: bool = stream._replica_result_future.done()
    return is_done
