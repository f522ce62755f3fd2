"""The replicas that poll an actor, and the pace at which it can answer all of them."""

from __future__ import annotations

import time
from typing import NamedTuple

MAX_POLLS_PER_S = 200.0
"""The most polls per second of all readers while nothing is new; they take about 5 % of the calls
one actor can answer."""

POSITIONS_PER_POLL = 100
"""A poll that follows this many namespaces more than another counts as one poll more: with 4,096
it takes some 20 ms of the actor's only thread."""

MAX_CATCH_UP_CALLS_PER_S = 1000.0

_TIMEOUT_S = 60.0


class _Reader(NamedTuple):
    """A replica that polls.

    Attributes:
        last_s: when it last did.
        load: how many polls of few namespaces its last one was worth.
    """

    last_s: float
    load: int


class Readers:
    """Whoever has polled in the last minute.

    Args:
        poll_interval_s: the least time between two polls of a reader that misses nothing.
    """

    def __init__(self, poll_interval_s: float) -> None:
        self._poll_interval_s = poll_interval_s
        self._known: dict[str, _Reader] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(self, name: str, num_positions: int) -> None:
        """``name`` polls, and follows ``num_positions`` namespaces."""
        self._known[name] = _Reader(time.monotonic(), 1 + num_positions // POSITIONS_PER_POLL)

    def forget_silent(self) -> list[str]:
        """Forget the readers that have not polled for a minute; returns them."""
        since_s = time.monotonic() - _TIMEOUT_S
        silent = [name for name, reader in self._known.items() if reader.last_s < since_s]
        for name in silent:
            del self._known[name]
        return silent

    def next_poll_s(self, *, is_complete: bool) -> float:
        """After how many seconds a reader is to poll again.

        Args:
            is_complete: whether it has now been sent everything.
        """
        load = sum(reader.load for reader in self._known.values())
        if not is_complete:
            return load / MAX_CATCH_UP_CALLS_PER_S
        return max(self._poll_interval_s, load / MAX_POLLS_PER_S)
