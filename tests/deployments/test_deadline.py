"""A deadline ends what is open when it comes, and nothing else."""

from __future__ import annotations

import asyncio
import math

import pytest

from deployments.deadline import Deadline
from hdserve.errors import RequestTimeout


def test_what_takes_longer_is_ended() -> None:
    """Once, and the error says by which limit."""

    async def ended() -> list[str]:
        deadline, calls = Deadline(0.01), list[str]()
        with deadline.ending(lambda: calls.append("cancelled")):
            await asyncio.sleep(0.05)
        assert deadline.is_over
        assert deadline.remaining_s == 0
        with pytest.raises(RequestTimeout, match=r"0\.01 s .*request_timeout_s"):
            await deadline.wait(asyncio.sleep(60))
        return calls

    assert asyncio.run(ended()) == ["cancelled"]


def test_what_was_complete_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it ended with an error."""

    async def ended() -> list[str]:
        loop = asyncio.get_running_loop()
        deadline, calls, time_s = Deadline(60), list[str](), loop.time
        assert await deadline.wait(asyncio.sleep(0, "done")) == "done"
        with deadline.ending(lambda: calls.append("cancelled")):
            await asyncio.sleep(0)
        with pytest.raises(ValueError), deadline.ending(lambda: calls.append("cancelled")):  # noqa: PT011
            raise ValueError
        monkeypatch.setattr(loop, "time", lambda: time_s() + 120)
        await asyncio.sleep(0.01)
        assert deadline.remaining_s == 0
        assert not deadline.is_over
        return calls

    assert asyncio.run(ended()) == []


def test_no_limit() -> None:
    """Nothing is ever ended."""

    async def ended() -> None:
        deadline = Deadline()
        assert deadline.remaining_s == math.inf
        with deadline.ending(lambda: pytest.fail("ended")):
            assert await deadline.wait(asyncio.sleep(0, "done")) == "done"

    asyncio.run(ended())


@pytest.mark.parametrize("timeout_s", [60.0, None])
def test_what_was_too_slow_by_another_limit_is_not_called_late(timeout_s: float | None) -> None:
    """The deadline has not come, or there is none."""

    async def fail() -> None:
        raise TimeoutError("by another limit")

    async def wait() -> None:
        await Deadline(timeout_s).wait(fail())

    with pytest.raises(TimeoutError, match="by another limit"):
        asyncio.run(wait())


def test_time_that_was_spent_before() -> None:
    """Counts."""

    async def wait() -> None:
        deadline = Deadline(60, spent_s=61)
        assert deadline.remaining_s == 0
        await deadline.wait(asyncio.sleep(60))

    with pytest.raises(RequestTimeout, match="60 s"):
        asyncio.run(wait())
