"""Ending streams whose replica is not heard of any more, or that will never have one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from deployments.cancelling import cancel_stream, is_assigned

_NUM_LOOKS = 4


class SilenceWatch:
    """Ends a streaming call of Ray Serve, while it is open, when the replica that has it was silent
    for ``max_silence_s``, or up to a quarter more; or when no replica has it, and none ever will.

    It counts how often a timer found nothing new, instead of comparing times: if this process
    itself stood still, it first takes what has come meanwhile.  A stream has one timer, and a
    message costs three assignments.

    Args:
        stream: as ``DeploymentResponseGenerator``.  While it waits for a replica nobody is silent.
        is_given_up: says whether there will never be a replica.

    Attributes:
        is_waiting: whether somebody waits for a message; who does not cannot hear one.  It is to be
            cleared when a message has come.
        is_over: whether the stream was ended because its replica was silent.
        is_in_vain: whether it was ended because there was none, and never will be.
    """

    def __init__(self, stream: Any, max_silence_s: float, is_given_up: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._interval_s = max_silence_s / _NUM_LOOKS
        self._is_given_up = is_given_up
        self._num_missed = 0
        self.is_waiting = True
        self.is_over = False
        self.is_in_vain = False

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def wait(self) -> None:
        """Note that the next message is waited for."""
        self.is_waiting = True
        self._num_missed = 0

    def _look(self) -> None:
        if not is_assigned(self._stream):
            self.is_in_vain = self._is_given_up()
        elif self.is_waiting:
            self._num_missed += 1
        self.is_over = self._num_missed > _NUM_LOOKS
        if self.is_over or self.is_in_vain:
            cancel_stream(self._stream)
        else:
            self._timer = self._loop.call_later(self._interval_s, self._look)
