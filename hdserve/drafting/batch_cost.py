"""The time of one forward as a function of what is in it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from hdserve.drafting.step_cost import FloatArray, StepCost

_SHORTEST_S = 1e-12
"""Less than anything takes: this replaces a time of zero from a coarse clock, so that gains can be
expressed as shares of it."""


class ForwardCost:
    """The time of one forward by its number of rows, interpolated between measured points.

    Args:
        seconds_by_rows: at least one point that is finite; others are ignored.  A point is assumed
            to cost no more than any point with more rows, because disturbances only make a
            measurement longer.
        last_slope: what each row beyond the last point costs; ``None``: as much as on average in
            the last half.

    Raises:
        ValueError: no point is finite.
    """

    def __init__(
        self, seconds_by_rows: Mapping[int, float], last_slope: float | None = None
    ) -> None:
        rows = sorted(row for row, seconds in seconds_by_rows.items() if math.isfinite(seconds))
        if not rows:
            raise ValueError(f"no time of a forward is finite: {dict(seconds_by_rows)}")
        self._rows: FloatArray = np.array(rows, np.float64)
        seconds = [max(_SHORTEST_S, seconds_by_rows[row]) for row in reversed(rows)]
        self._seconds: FloatArray = np.minimum.accumulate(seconds)[::-1]
        self._last_slope = self._slope() if last_slope is None else last_slope

    def __call__(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Seconds for ``num_rows``."""
        wanted = np.asarray(num_rows, np.float64)
        beyond = np.maximum(0.0, wanted - self._rows[-1]) * self._last_slope
        seconds: FloatArray = np.interp(wanted, self._rows, self._seconds) + beyond
        return seconds

    def going_on_as(self, other: ForwardCost) -> ForwardCost:
        """This cost, continued beyond its last point with the increments of ``other``.  Beyond all
        points the slope is also that of ``other``, if this one has no point in its first half."""
        last = self._rows[-1]
        beyond = other._rows > last
        points = dict(zip(self._rows, self._seconds, strict=True))
        more = self._seconds[-1] + other._seconds[beyond] - other(last)
        points |= dict(zip(other._rows[beyond], more, strict=True))
        has_half = self._rows[0] <= max(points) / 2
        return ForwardCost(
            {int(rows): float(seconds) for rows, seconds in points.items()},
            None if has_half else other._last_slope,
        )

    def _slope(self) -> float:
        """The slope of the last half of the rows: between two neighbours it may be all noise."""
        rows, seconds = np.append(0.0, self._rows), np.append(0.0, self._seconds)
        before = np.searchsorted(rows, rows[-1] / 2, side="right") - 1
        return float((seconds[-1] - seconds[before]) / (rows[-1] - rows[before]))

    def scaled(self, factor: float) -> ForwardCost:
        """The cost of forwards that take ``factor`` times as long."""
        seconds = (factor * self._seconds).tolist()
        points = dict(zip(self._rows.astype(int).tolist(), seconds, strict=True))
        return ForwardCost(points, factor * self._last_slope)


class BatchCost:
    """The time of one forward by its rows, the number of sequences that they belong to, and the
    length of these.

    Attention runs per sequence, so the same rows cost more if they belong to more sequences, and
    more if each has more columns to attend to.

    Args:
        by_num_sequences: at least one measured number of sequences; between two of them the cost is
            interpolated, beyond them it is that of the nearest.
        num_columns: cached tokens of each sequence while the cost was measured.
        column_cost: the seconds of one more cached token, by the rows of its sequence; ``None`` if
            that was not measured.
        reading_share: the time to find the likeliest tokens of a forward's rows, as a share of the
            forward.
    """

    def __init__(
        self,
        by_num_sequences: Mapping[int, ForwardCost],
        *,
        num_columns: int = 0,
        column_cost: ForwardCost | None = None,
        reading_share: float = 0.0,
    ) -> None:
        self._by_num_sequences = dict(sorted(by_num_sequences.items()))
        self._num_columns = num_columns
        self._column_cost = column_cost
        self._by_step: dict[int, StepCost] = {}
        """By number of sequences, as far as they were asked for."""
        self.reading_share = reading_share

    def scaled(self, factor: float) -> BatchCost:
        """The cost of forwards that all take ``factor`` times as long."""
        by_num_sequences = {
            number: cost.scaled(factor) for number, cost in self._by_num_sequences.items()
        }
        column_cost = None if self._column_cost is None else self._column_cost.scaled(factor)
        return BatchCost(
            by_num_sequences,
            num_columns=self._num_columns,
            column_cost=column_cost,
            reading_share=self.reading_share,
        )

    def of(self, num_sequences: int) -> StepCost:
        """The cost of forwards of this many sequences."""
        if num_sequences not in self._by_step:
            self._by_step[num_sequences] = StepCost(
                partial(self._tabulate, num_sequences),
                num_sequences,
                num_sequences * self._num_columns,
            )
        return self._by_step[num_sequences]

    def _tabulate(self, num_sequences: int, num_rows: FloatArray) -> FloatArray:
        """Seconds for ``num_rows`` together, and for each further cached token: ``[2, number]``."""
        seconds = np.zeros((2, len(num_rows)))
        seconds[0] = self(num_rows, num_sequences)
        if self._column_cost is not None:
            seconds[1] = self._column_cost(num_rows / num_sequences)
        return seconds

    def __call__(self, num_rows: npt.ArrayLike, num_sequences: int) -> FloatArray:
        """Seconds for ``num_rows`` of ``num_sequences`` of the length that was measured."""
        numbers = [*self._by_num_sequences]
        above = min(bisect_left(numbers, num_sequences), len(numbers) - 1)
        below = above if num_sequences >= numbers[above] else max(0, above - 1)
        low, high = numbers[below], numbers[above]
        share = (num_sequences - low) / (high - low) if high > low else 0.0
        costs = [self._by_num_sequences[number](num_rows) for number in (low, high)]
        seconds: FloatArray = (1.0 - share) * costs[0] + share * costs[1]
        return seconds
