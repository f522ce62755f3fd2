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


def test_messages_are_beats_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the event loop, which goes on by a second in each of its rounds; after the
    messages there are beats again."""

    async def num_beats() -> tuple[int, int]:
        found: list[None] = []
        now_s = 0

        async def pass_time(duration_s: int) -> None:
            nonlocal now_s
            for _ in range(duration_s):
                now_s += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        with Heartbeat(lambda: found.append(None), 100) as heartbeat:
            for _ in range(65):
                await pass_time(10)
                heartbeat.is_silent = False
            num_beside_messages = len(found)
            await pass_time(500)
        return num_beside_messages, len(found)

    assert asyncio.run(num_beats()) == (0, 4)


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
