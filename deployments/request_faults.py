"""How a replica tells the gateway that a request is at fault.

Ray Serve treats every exception that leaves a replica as a fault of the replica: it logs a
traceback and counts an error.  A bad request is no such fault, so
:class:`~hdserve.errors.RequestError` crosses as a value, and is raised again on the other side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from hdserve.errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestFault:
    """Is sent instead of an answer, or as the last of its messages."""

    error: RequestError


def tells_faults(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T | RequestFault]]:
    """Return ``method`` changed to return a fault instead of raising it."""

    @wraps(method)
    async def told(*args: P.args, **kwargs: P.kwargs) -> T | RequestFault:
        try:
            return await method(*args, **kwargs)
        except RequestError as error:
            return RequestFault(error)

    return told


def streams_faults(
    method: Callable[P, AsyncIterator[T]],
) -> Callable[P, AsyncIterator[T | RequestFault]]:
    """Return ``method``, an asynchronous generator, changed to end with a fault instead of raising
    it."""

    @wraps(method)
    async def told(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T | RequestFault]:
        messages = cast("AsyncGenerator[T]", method(*args, **kwargs))
        async with aclosing(messages):
            try:
                async for message in messages:
                    yield message
            except RequestError as error:
                yield RequestFault(error)

    return told


def without_fault(answer: T | RequestFault) -> T:
    """Return ``answer``, unless it is a fault.

    Raises:
        RequestError: it is a fault.
    """
    if isinstance(answer, RequestFault):
        raise answer.error
    return answer
