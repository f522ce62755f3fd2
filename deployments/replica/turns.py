"""Who had a turn, while that matters."""

from __future__ import annotations

from functools import partial
from itertools import takewhile


class Turns:
    """Gives each name a turn at most once in ``interval_s``; knows only names that had theirs."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._given_s: dict[str, float] = {}

    def take(self, name: str, now_s: float) -> bool:
        """Return whether it is the turn of ``name``, which is over then; ``now_s`` never
        decreases."""
        for other in [*takewhile(partial(self._is_over, now_s), self._given_s)]:
            del self._given_s[other]
        if name in self._given_s:
            return False
        self._given_s[name] = now_s
        return True

    def _is_over(self, now_s: float, name: str) -> bool:
        return now_s - self._given_s[name] >= self._interval_s
