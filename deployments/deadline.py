"""The time by which the answer to a request must be complete."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hdserve.errors import RequestTimeout

T = TypeVar("T")

MAX_UNREAD_S = 120.0
"""How long a client may take for each piece of what it is sent."""

_READING_GRACE_S = 5.0
"""How long a client may take, once the time of its request is over, to read what it was sent."""


class Deadline:
    """A time ``timeout_s`` after a request arrived, by the monotonic clock of the event loop; use
    it only in that loop.

    Args:
        timeout_s: ``None`` means never.
        spent_s: how long ago the request arrived.

    Attributes:
        is_over: whether the time was reached within a block of :meth:`ending`.
    """

    def __init__(self, timeout_s: float | None = None, spent_s: float = 0.0) -> None:
        self._timeout_s = timeout_s
        self._at_s: float | None = None
        if timeout_s is not None:
            self._at_s = asyncio.get_running_loop().time() + timeout_s - spent_s
        self.is_over = False

    @property
    def error(self) -> RequestTimeout:
        """The error for a request that this deadline ends."""
        return RequestTimeout(
            f"the answer was not complete {self._timeout_s:g} s after the request arrived "
            "(gateway.request_timeout_s)"
        )

    @property
    def remaining_s(self) -> float:
        """How many seconds remain."""
        if self._at_s is None:
            return math.inf
        return max(0.0, self._at_s - asyncio.get_running_loop().time())

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Return the result of ``awaitable``.

        Raises:
            RequestTimeout: it was cancelled at the deadline.
        """
        limit = self._limit(0.0)
        try:
            async with limit:
                return await awaitable
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self.error from error

    def reading_limit(self) -> asyncio.Timeout:
        """Return a block that is cancelled (``TimeoutError``) soon after the deadline: one that
        sends what the client may not read."""
        return self._limit(_READING_GRACE_S)

    def _limit(self, grace_s: float) -> asyncio.Timeout:
        return asyncio.timeout_at(None if self._at_s is None else self._at_s + grace_s)

    @contextmanager
    def ending(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call ``cancel`` at the deadline if the block is still open: a single timer, whatever
        happens in the block and how often."""
        if self._at_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_at(self._at_s, self._end, cancel)
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, cancel: Callable[[], None]) -> None:
        self.is_over = True
        cancel()
