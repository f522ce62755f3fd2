"""What a drafted token takes that forwards timed by themselves do not tell."""

from __future__ import annotations

from math import sqrt

_MEMORY = 0.99
"""The share of what is known that is left after each further step."""

_LEAST_SPREAD = 4.0
"""Squared drafted tokens of each sequence, summed over steps: with less, one more is taken to cost
little, as chance may have it either way."""

_NUM_FIRST = 9
"""Points that are looked at together, as everything takes long for the first time."""

_MAX_ERROR = 4.0
"""How far from the line a point may count, as a multiple of what points differ from it."""


class DraftPrice:
    """The seconds that one more drafted token takes beside the forward that was expected.

    Verifying it and learning from it is one part, known of every step.  The other is what forwards
    take more than those that were timed one after the other when the engine started: known of
    steps without rows of prompts.  Both are the slope of a line through the last steps, as the
    number of drafts differs from step to step.
    """

    def __init__(self) -> None:
        self._beside, self._forward = _Line(), _Line()

    @property
    def beside_s(self) -> float:
        """Of one token, beside forwards."""
        return self._beside.slope

    @property
    def seconds(self) -> float:
        """Of one token, altogether."""
        return self._beside.slope + self._forward.slope

    def add(self, num_drafts: float, beside_s: float, more_s: float | None) -> None:
        """Learn from a step, all for each of its sequences.

        Args:
            num_drafts: the drafted tokens of the forward.
            beside_s: what the step took beside its forward.
            more_s: what its forward took more than expected, if that is known.
        """
        self._beside.add(num_drafts, beside_s)
        if more_s is not None:
            self._forward.add(num_drafts, more_s)


class _Line:
    """A line by least squares through points that fade."""

    def __init__(self) -> None:
        self._first: list[tuple[float, float]] = []
        self._weight = self._x = self._y = 0.0
        self._xx = self._xy = 0.0
        self._error = 0.0

    @property
    def slope(self) -> float:
        """0 or more, and no more than is sure: less by what it may be off by."""
        return max(0.0, (self._xy - self._error * sqrt(self._xx)) / (self._xx + _LEAST_SPREAD))

    def add(self, x: float, y: float) -> None:
        """Add a point; one far from the line counts as one that is less far."""
        if len(self._first) < _NUM_FIRST:
            self._first.append((x, y))
            if len(self._first) == _NUM_FIRST:
                self._begin()
            return
        expected = self._y + self.slope * (x - self._x)
        most = _MAX_ERROR * self._error + abs(expected)
        self._add(x, expected + min(max(y - expected, -most), most))

    def _begin(self) -> None:
        middle = sorted(y for _, y in self._first)[_NUM_FIRST // 2]
        for x, y in self._first:
            self._add(x, min(max(y, middle - abs(middle)), middle + abs(middle)))

    def _add(self, x: float, y: float) -> None:
        error = abs(y - self._y - self.slope * (x - self._x)) if self._weight else 0.0
        self._weight = _MEMORY * self._weight + 1.0
        self._error += (error - self._error) / self._weight
        more_x, more_y = x - self._x, y - self._y
        self._x += more_x / self._weight
        self._y += more_y / self._weight
        self._xx = _MEMORY * self._xx + more_x * (x - self._x)
        self._xy = _MEMORY * self._xy + more_x * (y - self._y)
