"""Calls to an actor that may be dead, restarting, gone or not started yet."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from hdserve.errors import DatabaseError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CALL_TIMEOUT_S = 10.0
_MIN_BACK_OFF_S = 0.1
_MAX_BACK_OFF_S = 10.0


class ActorUnreachable(DatabaseError):
    """The actor did not answer; the call may or may not have been carried out."""


def _as_it_is(answer: Any) -> Any:
    return answer


class ActorMissing(ActorUnreachable):
    """There is no such actor, and the caller does not start one."""


class ActorLink:
    """A connection that finds its actor again.

    Args:
        resolve: returns a handle; it may block and raise.  ``ActorMissing`` is no failure.
        name: for the log.

    Attributes:
        num_failures: calls that failed.
        back_off_s: how long to wait before the next call; 0 after a success.  Random to some
            degree: what failed for many at once should not come back from all at once.
    """

    def __init__(self, resolve: Callable[[], Any], name: str) -> None:
        self.num_failures = 0
        self.back_off_s = 0.0
        self._pause_s = 0.0
        self._resolve = resolve
        self._name = name
        self._handle: Any = None

    async def call(self, method: str, message: bytes, read: Callable[[Any], _T] = _as_it_is) -> _T:
        """Call a method of the actor.

        Args:
            read: turns the answer into the result.  An answer it cannot read, perhaps of another
                version, counts as a failure like any other.

        Raises:
            ActorUnreachable: try again after ``back_off_s``.
            DatabaseError: the actor refused the message, so that sending it again is useless, or
                ``read`` raised it.
        """
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(self._resolve)
            answer = await self._answer(getattr(self._handle, method).remote(message))
        except ActorMissing:
            self._note_missing()
            raise
        except RayTaskError as error:
            self._count_failure(error)
            raise DatabaseError(f"{self._name} refused a message: {error}") from error
        except Exception as error:  # no exception of Ray may reach a request
            self._handle = None
            self._count_failure(error)
            raise ActorUnreachable(f"{self._name}: {error!r}") from error
        try:
            result = read(answer)
        except DatabaseError as error:
            self._count_failure(error)
            raise
        self.back_off_s = self._pause_s = 0.0
        return result

    async def _answer(self, reference: Any) -> Any:
        """Wait for a call.  One that takes too long is withdrawn, as it will be repeated, unless
        the actor has begun to carry it out.

        Raises:
            TimeoutError: it takes too long.
        """
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            ray.cancel(reference)
            raise

    def _note_missing(self) -> None:
        if not self.back_off_s:
            logger.info("%s does not exist yet", self._name)
        self.back_off_s = _MAX_BACK_OFF_S

    def _count_failure(self, error: Exception) -> None:
        self.num_failures += 1
        if not self.back_off_s:
            logger.warning("a call to %s failed: %r", self._name, error)
        self._pause_s = min(max(2 * self._pause_s, _MIN_BACK_OFF_S), _MAX_BACK_OFF_S)
        self.back_off_s = random.uniform(0.5, 1.0) * self._pause_s
