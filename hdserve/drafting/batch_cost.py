"""The time of one forward as a function of what is in it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

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
        self._tables: dict[int, tuple[_Table, _Table | None]] = {}
        """By number of sequences: the cost of all rows, and of each column, by the total number of
        rows of the sequences."""
        self._plain_s: dict[int, tuple[float, float]] = {}
        """By number of sequences: the cost of one row for each, and of another column."""
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

    def of_drafts(
        self,
        num_drafts: int,
        num_sequences: int,
        *,
        num_columns: int = 0,
        num_other_rows: int = 0,
    ) -> FloatArray:
        """Seconds of a step of ``num_sequences`` that drafts 0, 1, ... ``num_drafts`` tokens.

        Args:
            num_columns: cached tokens of all sequences together.
            num_other_rows: rows of prompts in the same forward; they are not part of the price, but
                make drafts cheaper or more expensive.
        """
        of_rows, of_column = self._tables_of(num_sequences)
        seconds = of_rows(num_sequences + num_other_rows, num_drafts)
        if num_other_rows:
            seconds = seconds - seconds[0] + of_rows(num_sequences, 0)
        num_more = num_columns - num_sequences * self._num_columns
        if of_column is not None and num_more > 0:
            seconds = seconds + num_more * of_column(num_sequences, num_drafts)
        return seconds

    def of_cheapest_draft(
        self,
        max_drafts: int,
        num_sequences: int,
        *,
        num_columns: int,
        num_other_rows: int,
    ) -> float:
        """A lower bound, in seconds, of what any single draft adds to a step: at most the smallest
        difference between neighbours in :meth:`of_drafts`.

        Args:
            max_drafts: at least one.
            num_columns, num_other_rows: as for :meth:`of_drafts`.
        """
        of_rows, of_column = self._tables_of(num_sequences)
        row_s = of_rows.least_more(num_sequences + num_other_rows, max_drafts)
        num_more = num_columns - num_sequences * self._num_columns
        if of_column is None or num_more <= 0:
            return row_s
        return row_s + num_more * of_column.least_more(num_sequences, max_drafts)

    def of_plain(self, num_sequences: int, num_columns: int = 0) -> float:
        """Seconds for one row each of ``num_sequences``."""
        if num_sequences not in self._plain_s:
            of_rows, of_column = self._tables_of(num_sequences)
            column_s = 0.0 if of_column is None else float(of_column(num_sequences, 0)[0])
            self._plain_s[num_sequences] = float(of_rows(num_sequences, 0)[0]), column_s
        rows_s, column_s = self._plain_s[num_sequences]
        return rows_s + max(0, num_columns - num_sequences * self._num_columns) * column_s

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

    def _tables_of(self, num_sequences: int) -> tuple[_Table, _Table | None]:
        if num_sequences not in self._tables:
            cost = self._column_cost
            of_column = None if cost is None else _Table(lambda rows: cost(rows / num_sequences))
            of_rows = _Table(lambda rows: self(rows, num_sequences))
            self._tables[num_sequences] = of_rows, of_column
        return self._tables[num_sequences]


class _Table:
    """The values of a function of 0, 1, 2, ... rows, computed when first needed."""

    def __init__(self, function: Callable[[FloatArray], FloatArray]) -> None:
        self._function = function
        self._values: FloatArray = np.empty(0)
        self._differences: FloatArray = np.empty(0)
        self._asked, self._least_more = (0, 0), 0.0

    def __call__(self, first: int, number: int) -> FloatArray:
        """The values for ``first`` rows and up to ``number`` more, as an array that must not be
        modified."""
        if len(self._values) <= first + number:
            self._values = self._function(np.arange(2.0 * (first + number + 1)))
            self._differences = np.diff(self._values)
        return self._values[first : first + number + 1]

    def least_more(self, first: int, number: int) -> float:
        """The least that any of the ``number`` rows after ``first`` adds."""
        if (first, number) != self._asked:
            self(first, number)
            self._least_more = float(self._differences[first : first + number].min())
            self._asked = first, number
        return self._least_more
