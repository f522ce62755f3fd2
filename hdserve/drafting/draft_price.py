"""The cost of a drafted token that timing forwards by themselves does not show."""

from __future__ import annotations

from math import sqrt

_MEMORY = 0.99
"""The share of what is known that remains after each further step."""

_LEAST_SPREAD = 4.0
"""Squared drafted tokens of each sequence, summed over steps: if there are few, the slope is damped
towards zero, as it may be chance."""

_NUM_FIRST = 9
"""The first points, which are processed together, as everything takes long the first time."""

_MAX_ERROR = 4.0
"""How far from the line a point may count, in addition to the line's own height: as a multiple of
the mean deviation."""

_MEMORY_UNSEEN = 0.9995
"""The share of what is known that remains after each step without drafts."""


class DraftPrice:
    """The seconds that one more drafted token takes in addition to the forward that was expected.

    One part is verifying it and learning from it, known from every step; steps with rows of prompts
    have a separate line, as they take longer and draft other numbers.  The other part is how much
    longer forwards take than those timed in a row when the engine started, known from steps without
    such rows. All are slopes of lines through the last steps, as the number of drafts differs from
    step to step.
    """

    def __init__(self) -> None:
        self._alone, self._beside_prompts, self._forward = _Line(), _Line(), _Line()

    def beside_forward_s(self, *, has_prompts: bool) -> float:
        """Of one token, without the forward, in a step with rows of prompts or without; the same
        until there were enough steps with prompts."""
        is_other = has_prompts and self._beside_prompts.is_known
        return (self._beside_prompts if is_other else self._alone).slope

    def seconds(self, *, has_prompts: bool) -> float:
        """Of one token, in total."""
        return self.beside_forward_s(has_prompts=has_prompts) + self._forward.slope

    def add(self, num_drafts: float, beside_s: float, more_s: float | None) -> None:
        """Learn from a step; all values are for each of its sequences.

        Args:
            num_drafts: the drafted tokens of the forward.
            beside_s: the time of the step without its forward.
            more_s: the forward's time beyond the expected; ``None``: it has rows of prompts.
        """
        if more_s is None:
            self._beside_prompts.add(num_drafts, beside_s)
        else:
            self._alone.add(num_drafts, beside_s)
            self._forward.add(num_drafts, more_s)

    def fade(self, num_steps: int) -> None:
        """Trust the lines less: this many steps had no drafts to measure."""
        for line in (self._alone, self._beside_prompts, self._forward):
            line.fade(_MEMORY_UNSEEN**num_steps)


class _Line:
    """A line by least squares through points that fade.

    Attributes:
        slope: at least 0, and only as much as is certain: reduced by its possible error.
        is_known: whether there were enough points for a slope.
    """

    __slots__ = ("_error", "_first", "_weight", "_x", "_xx", "_xy", "_y", "is_known", "slope")

    def __init__(self) -> None:
        self._first: list[tuple[float, float]] = []
        self._weight = self._x = self._y = 0.0
        self._xx = self._xy = 0.0
        self._error = 0.0
        self.slope, self.is_known = 0.0, False

    def add(self, x: float, y: float) -> None:
        """Add a point; one far from the line is moved closer."""
        if not self.is_known:
            self._first.append((x, y))
            if len(self._first) == _NUM_FIRST:
                self._begin()
            return
        expected = self._y + self.slope * (x - self._x)
        most = _MAX_ERROR * self._error + abs(expected)
        self._add(x, expected + min(max(y - expected, -most), most))

    def fade(self, share: float) -> None:
        """Let the points so far count less, and reduce the slope."""
        self._weight *= share
        self._xx *= share
        self._xy *= share
        self._tilt()

    def _begin(self) -> None:
        self.is_known = True
        middle = sorted(y for _, y in self._first)[_NUM_FIRST // 2]
        for x, y in self._first:
            self._add(x, min(max(y, middle - abs(middle)), middle + abs(middle)))

    def _add(self, x: float, y: float) -> None:
        more_x, more_y = x - self._x, y - self._y
        error = abs(more_y - self.slope * more_x) if self._weight else 0.0
        remaining = _MEMORY * self._weight
        self._weight = remaining + 1.0
        self._error += (error - self._error) / self._weight
        self._x += more_x / self._weight
        self._y += more_y / self._weight
        share = remaining / self._weight
        self._xx = _MEMORY * self._xx + share * more_x * more_x
        self._xy = _MEMORY * self._xy + share * more_x * more_y
        self._tilt()

    def _tilt(self) -> None:
        certain = self._xy - self._error * sqrt(self._xx)
        self.slope = max(0.0, certain / (self._xx + _LEAST_SPREAD))
