"""A replica that has nothing to send shows that it is there, and only then."""

from __future__ import annotations

import asyncio

import pytest

from deployments.generation import HEARTBEAT
from deployments.replica.heartbeat import Heartbeat, beats_until
from tests.waiting import WAIT_S

INTERVAL_S = 0.05


def test_a_silence_has_beats() -> None:
    """Until it is over; none is left behind."""

    async def beats() -> bool:
        found = asyncio.Queue[None]()
        with Heartbeat(lambda: found.put_nowait(None), INTERVAL_S):
            async with asyncio.timeout(WAIT_S):
                for _ in range(3):
                    await found.get()
        await asyncio.sleep(3 * INTERVAL_S)
        return found.empty()

    assert asyncio.run(beats())


def test_messages_are_beats_enough() -> None:
    async def num_beats() -> int:
        found: list[None] = []
        with Heartbeat(lambda: found.append(None), INTERVAL_S) as heartbeat:
            for _ in range(60):
                await asyncio.sleep(INTERVAL_S / 10)
                heartbeat.is_silent = False
        return len(found)

    assert asyncio.run(num_beats()) == 0


def test_who_wants_none_gets_none() -> None:
    async def num_beats() -> int:
        found: list[None] = []
        with Heartbeat(lambda: found.append(None), None):
            await asyncio.sleep(3 * INTERVAL_S)
        done: asyncio.Future[None] = asyncio.ensure_future(asyncio.sleep(3 * INTERVAL_S))
        found += [None async for _ in beats_until(done, None)]
        return len(found)

    assert asyncio.run(num_beats()) == 0


def test_what_takes_long_has_beats_until_it_is_done() -> None:
    """And fails as it would without them."""

    async def fails(may_end: asyncio.Event) -> None:
        await may_end.wait()
        raise KeyError

    async def messages() -> list[object]:
        may_end = asyncio.Event()
        working = asyncio.create_task(fails(may_end))
        found: list[object] = []
        async with asyncio.timeout(WAIT_S):
            async for beat in beats_until(working, INTERVAL_S):
                found.append(beat)
                if len(found) == 3:
                    may_end.set()
        with pytest.raises(KeyError):
            working.result()
        return found

    assert asyncio.run(messages())[:3] == [HEARTBEAT] * 3


def test_what_nobody_waits_for_ends() -> None:
    """When the iterator is closed."""

    async def is_cancelled() -> bool:
        working = asyncio.create_task(asyncio.sleep(WAIT_S))
        beats = beats_until(working, INTERVAL_S)
        assert await anext(beats) == HEARTBEAT
        await beats.aclose()
        return working.cancelled()

    assert asyncio.run(is_cancelled())
