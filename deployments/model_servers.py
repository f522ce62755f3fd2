"""Calls of the model servers, and what their failures mean to a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from deployments.cancelling import cancel_stream, is_given_up
from deployments.deadline import Deadline
from deployments.generation import GenerationRequest, Records, Summary
from deployments.request_faults import without_fault
from deployments.silence import SilenceWatch
from hdserve.errors import BodyTooLarge, EngineStopped, HdserveError, Overloaded, RequestError

logger = logging.getLogger(__name__)

_HEARTBEATS = 6
"""How many heartbeats a silent replica sends, or half as many, in the time after which one without
any is taken for dead."""

_WENT_AWAY = "the model's replica went away; try again"

_TOO_LARGE = "message larger than max"
"""What gRPC says of a message over its limit.  The same code stands for whatever else it, or the
system, has no room for."""


class ModelServers:
    """Calls replicas of models; whatever goes wrong is raised as an :class:`HdserveError`.

    Args:
        handles: those of the model servers, by model name.
        max_silence_s: how long a replica that answers may be silent; it is asked for heartbeats.
        on_silence: called with the name of the model for each answer that ended for this reason.

    Attributes:
        handles: the same, for calls of all replicas, which are answered in one message.
    """

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle[Any]],
        max_silence_s: float,
        on_silence: Callable[[str], None],
    ) -> None:
        self._max_silence_s = max_silence_s
        self._heartbeat_s = max_silence_s / _HEARTBEATS
        self._on_silence = on_silence
        # gRPC instead of Ray actor calls: half the processor time per message.
        self.handles: Mapping[str, Any] = {
            name: handle.options(_by_reference=False) for name, handle in handles.items()
        }
        self._streaming: Mapping[str, Any] = {
            name: handle.options(stream=True, response_serialization="pickle")
            for name, handle in self.handles.items()
        }

    def generate(
        self, model: str, request: GenerationRequest, deadline: Deadline
    ) -> AsyncGenerator[Records, None]:
        """Return the records of one answer of one replica, as many at a time as have arrived.

        Closing the iterator aborts the request, and so does ``deadline``.

        Raises:
            HdserveError: the model server raised it, or there is none.
            EngineStopped: the replica that had begun was silent for too long.
            RequestTimeout: the deadline was reached.
        """
        request = replace(request, heartbeat_s=self._heartbeat_s)

        def begin(handle: Any) -> Any:
            if request.session_id:
                handle = handle.options(session_id=request.session_id)
            return handle.generate.remote(request)

        return self._messages(model, begin, deadline)

    async def call(self, model: str, method: str, *arguments: Any) -> Any:
        """Return what ``method`` of one replica returns, however long that takes.

        Raises:
            HdserveError: the model server raised it, or there is none.
            EngineStopped: the replica that had begun was silent for too long.
        """

        def begin(handle: Any) -> Any:
            return handle.call.remote(method, arguments, self._heartbeat_s)

        (answer,) = [answer async for (answer,) in self._messages(model, begin, Deadline())]
        return without_fault(answer)

    async def _messages(
        self, model: str, begin: Callable[[Any], Any], deadline: Deadline
    ) -> AsyncGenerator[tuple[Any, ...]]:
        """Yield the messages of a stream that ``begin`` begins, but for heartbeats.

        Closing it ends the call, which after the summary ends on its own.
        """
        stream = watch = None
        is_complete = False
        try:
            handle = self._streaming[model]
            stream = begin(handle)
            watch = SilenceWatch(stream, self._max_silence_s, partial(is_given_up, handle))
            with deadline.ending(partial(cancel_stream, stream)), watch:
                async for message in stream:
                    watch.is_waiting = False
                    if found := without_fault(message):
                        is_complete = isinstance(found[-1], Summary)
                        yield found
                    watch.wait()
        except RequestError:
            raise
        except RequestCancelledError as error:
            cancel_stream(stream)
            raise self._reason(model, deadline, watch) or asyncio.CancelledError() from error
        except Exception as error:
            if stream is not None:  # the call goes on if its message could not be read
                cancel_stream(stream)
            raise self._reason(model, deadline, watch) or translated(error) from error
        except BaseException:  # closed or cancelled
            if not (stream is None or is_complete):
                cancel_stream(stream)
            raise

    def _reason(
        self, model: str, deadline: Deadline, watch: SilenceWatch | None
    ) -> HdserveError | None:
        """Return why this side has ended an answer, if it has."""
        if deadline.is_over:
            return deadline.error
        if watch is not None and watch.is_in_vain:
            return EngineStopped(_WENT_AWAY)
        if watch is None or not watch.is_over:
            return None
        self._on_silence(model)
        silence = f"{self._max_silence_s:g} s (gateway.max_replica_silence_s)"
        logger.warning("a replica of %s has not been heard of for %s", model, silence)
        return EngineStopped(f"the model's replica was not heard of for {silence}; try again")

    async def call_all(
        self,
        model: str,
        timeout_s: float,
        method: str,
        *arguments: Any,
        may_have_none: bool = False,
    ) -> list[Any]:
        """Return what ``method`` of each replica returns.

        Args:
            may_have_none: whether it is fine that there is no replica.

        Raises:
            HdserveError: the first failing replica raised it, or one has not answered in time.
        """
        try:
            called = self.handles[model].broadcast(method, *arguments)
            answers: list[Any] = await called.results_async(timeout_s=timeout_s)
        except TimeoutError as error:
            raise EngineStopped("a replica of the model did not answer; try again") from error
        except Exception as error:
            if may_have_none and isinstance(error, DeploymentUnavailableError):
                return []
            raise translated(error) from error
        return [without_fault(answer) for answer in answers]


def translated(error: Exception) -> HdserveError:
    """Return what a failed call of a model server means to the client."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, HdserveError):
        return cause
    if isinstance(error, BackPressureError):
        return Overloaded()
    if isinstance(error, AioRpcError) and error.code() is StatusCode.RESOURCE_EXHAUSTED:
        if _TOO_LARGE in (error.details() or ""):
            return BodyTooLarge("the request, or the answer to it, is too large to be passed on")
        return Overloaded("the way to the model's replica is overloaded; try again later")
    if isinstance(error, (DeploymentUnavailableError, RayActorError, AioRpcError)):
        return EngineStopped(_WENT_AWAY)
    logger.error("a model server failed", exc_info=error)
    return HdserveError("the model server failed; its log says why")
