"""Which names had a turn recently."""

from __future__ import annotations

from functools import partial
from itertools import takewhile


class RateLimiter:
    """Gives each name at most one turn per ``interval_s``; forgets names whose interval is over."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._given_s: dict[str, float] = {}

    def take(self, name: str, now_s: float) -> bool:
        """Return whether it is the turn of ``name``, and take it; ``now_s`` never decreases."""
        for other in [*takewhile(partial(self._is_over, now_s), self._given_s)]:
            del self._given_s[other]
        if name in self._given_s:
            return False
        self._given_s[name] = now_s
        return True

    def _is_over(self, now_s: float, name: str) -> bool:
        return now_s - self._given_s[name] >= self._interval_s
