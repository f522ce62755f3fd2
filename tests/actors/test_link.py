"""Calls whose answers cannot be used."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import link as links
from actors.link import ActorLink, ActorUnreachable
from hdserve.errors import DatabaseError, SnapshotError
from tests.waiting import WAIT_S


def answering(message: bytes) -> Any:
    """What Ray gives for the call of a method that answers with its message."""
    future: Future[bytes] = Future()
    future.set_result(message)
    return SimpleNamespace(future=lambda: future)


def read(answer: bytes) -> str:
    if answer == b"?":
        raise SnapshotError("of another version")
    return answer.decode()


@pytest.mark.ray
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_a_call_that_took_too_long_is_withdrawn(
    is_asked_before: bool, holder_and_waiting: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an actor waits for resources, messages do not pile up that are sent again anyway; what
    is asked before and after them is answered."""
    holder, waiting = holder_and_waiting
    before = [waiting.told.remote()] * is_asked_before
    link = ActorLink(lambda: waiting, "the actor")
    with monkeypatch.context() as patch:
        patch.setattr(links, "CALL_TIMEOUT_S", 0.1)
        for _ in range(3):
            with pytest.raises(ActorUnreachable):
                asyncio.run(link.call("tell", b"early"))
    after = waiting.told.remote()
    ray.kill(holder)
    for answer in [*before, after]:
        assert ray.get(answer, timeout=WAIT_S) == []


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


def test_those_that_fail_together_come_back_apart() -> None:
    """An actor that was too slow for all is not asked by all at once again."""
    actor = SimpleNamespace(ask=SimpleNamespace(remote=answering))
    links = [ActorLink(lambda: actor, "the actor") for _ in range(10)]
    for link in links:
        with pytest.raises(DatabaseError):
            asyncio.run(link.call("ask", b"?", read))
    assert len({link.back_off_s for link in links}) > 1
