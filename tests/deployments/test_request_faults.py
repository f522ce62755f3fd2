"""Requests at fault cross from replica to gateway as values, and faults of the replica do not."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator

import pytest

from deployments.request_faults import (
    RequestFault,
    streams_faults,
    tells_faults,
    without_fault,
)
from hdserve.errors import EngineStopped, InvalidRequest, Overloaded, PromptTooLong, RequestError

FAULT = PromptTooLong("too long", "messages", 9, 8)


class Server:
    """Raises what it is told to."""

    def __init__(self) -> None:
        self.is_closed = False

    @tells_faults
    async def tokenize(self, error: Exception | None) -> int:
        """The docstring."""
        if error is not None:
            raise error
        return 7

    @streams_faults
    async def generate(self, error: Exception | None) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
            if error is not None:
                raise error
        finally:
            self.is_closed = True


async def messages(error: Exception | None) -> list[int | RequestFault]:
    return [message async for message in Server().generate(error)]


def test_answers_are_what_they_were() -> None:
    assert asyncio.run(messages(None)) == [1, 2]
    assert without_fault(asyncio.run(Server().tokenize(None))) == 7
    assert Server.tokenize.__doc__ == "The docstring."


@pytest.mark.parametrize("error", [FAULT, InvalidRequest("no", "tokens"), Overloaded("full")])
def test_a_fault_is_a_value(error: RequestError) -> None:
    """It is raised where the answer would have been used, after what came before it."""
    *first, last = asyncio.run(messages(error))
    assert first == [1, 2]
    for answer in (last, asyncio.run(Server().tokenize(error))):
        assert isinstance(answer, RequestFault)
        with pytest.raises(type(error)) as caught:
            without_fault(pickle.loads(pickle.dumps(answer)))
        assert vars(caught.value) == vars(error)


def test_faults_of_the_replica_are_raised() -> None:
    """Whoever runs the server is to see those."""
    for error in (EngineStopped("gone"), ValueError("a bug")):
        with pytest.raises(type(error)):
            asyncio.run(messages(error))
        with pytest.raises(type(error)):
            asyncio.run(Server().tokenize(error))


def test_who_hangs_up_is_noticed_at_once() -> None:
    """What generates ends with the stream, not when somebody collects it."""

    async def begin() -> bool:
        server = Server()
        stream = server.generate(None)
        assert await anext(stream) == 1
        await stream.aclose()  # type: ignore[attr-defined]
        return server.is_closed

    assert asyncio.run(begin())
