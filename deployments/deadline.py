"""When the answer to a request has to be complete."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hdserve.errors import RequestTimeout

T = TypeVar("T")


class Deadline:
    """The moment ``timeout_s`` after this was made, by the monotonic clock of the event loop, in
    which all of it is used.

    Args:
        timeout_s: ``None`` is never.

    Attributes:
        is_over: whether an open block of :meth:`ending` was there when it came.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._at_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self.is_over = False

    @property
    def error(self) -> RequestTimeout:
        """The error that a request is answered with when it ends it."""
        return RequestTimeout(
            f"the answer was not complete {self._timeout_s:g} s after the request had come "
            "(gateway.request_timeout_s)"
        )

    @property
    def remaining_s(self) -> float:
        """How many seconds there are until then."""
        if self._at_s is None:
            return math.inf
        return max(0.0, self._at_s - asyncio.get_running_loop().time())

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Return the result of ``awaitable``.

        Raises:
            RequestTimeout: it was cancelled, because it took until then.
        """
        try:
            async with asyncio.timeout_at(self._at_s):
                return await awaitable
        except TimeoutError as error:
            raise self.error from error

    def limit(self, grace_s: float) -> asyncio.Timeout:
        """Return a block that is cancelled, with ``TimeoutError``, ``grace_s`` after then."""
        return asyncio.timeout_at(None if self._at_s is None else self._at_s + grace_s)

    @contextmanager
    def ending(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Have ``cancel`` called then, if the block is still open: one timer, whatever happens in
        the block and how often."""
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
