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


def never() -> bool:
    """Say that the model was not given up."""
    return False


def test_a_silent_stream_is_ended() -> None:
    """Once."""

    async def ended() -> int:
        stream = Stream()
        with SilenceWatch(stream, MAX_SILENCE_S, never) as watch:
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
        with SilenceWatch(stream, MAX_SILENCE_S, never) as watch:
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
        with SilenceWatch(stream, MAX_SILENCE_S, never):
            await asyncio.sleep(LONG_S)
        return stream.num_cancelled

    assert asyncio.run(ended()) == 0


def test_a_request_that_no_replica_will_ever_have_is_ended() -> None:
    """When the model is given up, which is no silence; who has a replica keeps it."""

    async def ended() -> None:
        waiting, assigned = Stream(is_assigned=False), Stream()
        is_given_up = [False]
        with (
            SilenceWatch(waiting, MAX_SILENCE_S, lambda: is_given_up[0]) as watch,
            SilenceWatch(assigned, MAX_SILENCE_S, lambda: True) as other,
        ):
            other.is_waiting = False
            await asyncio.sleep(LONG_S)
            assert not watch.is_in_vain
            is_given_up[0] = True
            async with asyncio.timeout(WAIT_S):
                while not watch.is_in_vain:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(LONG_S)
            assert (waiting.num_cancelled, watch.is_over) == (1, False)
            assert (assigned.num_cancelled, other.is_over, other.is_in_vain) == (0, False, False)

    asyncio.run(ended())


def test_a_client_that_does_not_read_is_no_silence() -> None:
    """Until it has, nobody listens."""

    async def ended() -> tuple[int, bool]:
        stream = Stream()
        with SilenceWatch(stream, MAX_SILENCE_S, never) as watch:
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
        with SilenceWatch(stream, MAX_SILENCE_S, never) as watch:
            time.sleep(LONG_S)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            watch.is_waiting = False
            watch.wait()
        return stream.num_cancelled

    assert asyncio.run(ended()) == 0
