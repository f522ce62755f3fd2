"""Calls whose answers cannot be used."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from actors.link import ActorLink
from hdserve.errors import DatabaseError, SnapshotError


def answering(message: bytes) -> Any:
    """What Ray gives for the call of a method that answers with its message."""
    future: Future[bytes] = Future()
    future.set_result(message)
    return SimpleNamespace(future=lambda: future)


def read(answer: bytes) -> str:
    if answer == b"?":
        raise SnapshotError("of another version")
    return answer.decode()


def test_an_answer_that_cannot_be_read_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and asked for again after longer and longer, until one can be read."""
    actor = SimpleNamespace(ask=SimpleNamespace(remote=answering))
    link = ActorLink(lambda: actor, "the actor")
    pauses = []
    for _ in range(3):
        with pytest.raises(DatabaseError, match="another version"):
            asyncio.run(link.call("ask", b"?", read))
        pauses.append(link.back_off_s)
    assert pauses[0] > 0
    assert pauses == sorted({*pauses})
    assert (link.num_failures, len(caplog.records)) == (3, 1)
    assert asyncio.run(link.call("ask", b"yes", read)) == "yes"
    assert (link.num_failures, link.back_off_s) == (3, 0.0)
    assert asyncio.run(link.call("ask", b"?")) == b"?"
