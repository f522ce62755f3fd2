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
"""How far from the line a point may count, beyond the line's own height: as a multiple of what
points differ from it."""

_MEMORY_UNSEEN = 0.9995
"""The share of what is known that is left after each step without drafts."""


class DraftPrice:
    """The seconds that one more drafted token takes beside the forward that was expected.

    Verifying it and learning from it is one part, known of every step; those with rows of prompts
    are a line of their own, as they take longer and draft other numbers.  The other part is what
    forwards take more than those that were timed one after the other when the engine started, known
    of steps without such rows.  All are slopes of lines through the last steps, as the number of
    drafts differs from step to step.
    """

    def __init__(self) -> None:
        self._alone, self._beside_prompts, self._forward = _Line(), _Line(), _Line()

    def beside_forward_s(self, *, has_prompts: bool) -> float:
        """Of one token, without the forward, in a step with rows of prompts or without: the same
        until there were some of those."""
        is_other = has_prompts and self._beside_prompts.is_known
        return (self._beside_prompts if is_other else self._alone).slope

    def seconds(self, *, has_prompts: bool) -> float:
        """Of one token, altogether."""
        return self.beside_forward_s(has_prompts=has_prompts) + self._forward.slope

    def add(self, num_drafts: float, beside_s: float, more_s: float | None) -> None:
        """Learn from a step, all for each of its sequences.

        Args:
            num_drafts: the drafted tokens of the forward.
            beside_s: what the step took beside its forward.
            more_s: what its forward took more than expected; None: it has rows of prompts.
        """
        if more_s is None:
            self._beside_prompts.add(num_drafts, beside_s)
        else:
            self._alone.add(num_drafts, beside_s)
            self._forward.add(num_drafts, more_s)

    def fade(self, num_steps: int) -> None:
        """Be less sure: for so long no drafts were made that would tell what they take by now."""
        for line in (self._alone, self._beside_prompts, self._forward):
            line.fade(_MEMORY_UNSEEN**num_steps)


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

    @property
    def is_known(self) -> bool:
        """Whether there were points enough for a slope."""
        return len(self._first) == _NUM_FIRST

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

    def fade(self, share: float) -> None:
        """Let the points so far count less, and the slope with them."""
        self._weight *= share
        self._xx *= share
        self._xy *= share

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
