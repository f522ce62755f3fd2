"""A stream ends when its replica is not heard of, and for no other reason."""

from __future__ import annotations

import asyncio
import time

from deployments.silence import SilenceWatch
from tests.waiting import WAIT_S

MAX_SILENCE_S = 0.2
LONG_S = 3 * MAX_SILENCE_S


class Call:
    """What a replica has confirmed."""

    def cancel(self) -> None:
        return


class Stream:
    """What the watch knows of a streaming call of Ray Serve."""

    def __init__(self, *, is_assigned: bool = True) -> None:
        self._replica_result_future = asyncio.get_running_loop().create_future()
        self.num_cancelled = 0
        if is_assigned:
            self._replica_result_future.set_result(Call())

    def cancel(self) -> None:
        self.num_cancelled += 1


def test_a_silent_stream_is_ended() -> None:
    """Once."""

    async def ended() -> int:
        stream = Stream()
        with SilenceWatch(stream, MAX_SILENCE_S) as watch:
            async with asyncio.timeout(WAIT_S):
                while not watch.is_over:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(LONG_S)
        return stream.num_cancelled

    assert asyncio.run(ended()) == 1


def test_one_that_is_heard_of_is_not() -> None:
    """However little it says."""

    async def ended() -> int:
        stream = Stream()
        with SilenceWatch(stream, MAX_SILENCE_S) as watch:
            for _ in range(60):
                await asyncio.sleep(MAX_SILENCE_S / 20)
                watch.is_waiting = False
                watch.wait()
        await asyncio.sleep(LONG_S)
        return stream.num_cancelled

    assert asyncio.run(ended()) == 0


def test_a_request_that_no_replica_has_yet_is_no_silence() -> None:
    """A model may have to start."""

    async def ended() -> int:
        stream = Stream(is_assigned=False)
        with SilenceWatch(stream, MAX_SILENCE_S):
            await asyncio.sleep(LONG_S)
        return stream.num_cancelled

    assert asyncio.run(ended()) == 0


def test_a_client_that_does_not_read_is_no_silence() -> None:
    """Until it has, nobody listens."""

    async def ended() -> tuple[int, bool]:
        stream = Stream()
        with SilenceWatch(stream, MAX_SILENCE_S) as watch:
            watch.is_waiting = False
            await asyncio.sleep(LONG_S)
            num_before = stream.num_cancelled
            watch.wait()
            async with asyncio.timeout(WAIT_S):
                while not watch.is_over:
                    await asyncio.sleep(0.01)
        return num_before, watch.is_over

    assert asyncio.run(ended()) == (0, True)


def test_a_gateway_that_stood_still_listens_before_it_judges() -> None:
    """What came meanwhile counts."""

    async def ended() -> int:
        stream = Stream()
        with SilenceWatch(stream, MAX_SILENCE_S) as watch:
            time.sleep(LONG_S)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            watch.is_waiting = False
            watch.wait()
        return stream.num_cancelled

    assert asyncio.run(ended()) == 0
