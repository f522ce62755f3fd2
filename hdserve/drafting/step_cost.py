"""The time of the forwards of one number of sequences, as numbers that are looked up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hdserve.databases.cache_lines import address_of

FloatArray = npt.NDArray[np.float64]


class StepCost:
    """The time of one forward of ``num_sequences``, by its rows, tabulated when first needed.

    Args:
        tabulate: for numbers of rows, the seconds of all of them, and those of each further cached
            token: ``[2, number]``.
        num_known_columns: cached tokens of all sequences together, up to which the former hold.

    Attributes:
        table: what ``tabulate`` gives for 0, 1, 2, ... rows.
        num_rows: how many numbers of rows ``table`` has.
        address: of ``table``.
    """

    def __init__(
        self,
        tabulate: Callable[[FloatArray], FloatArray],
        num_sequences: int,
        num_known_columns: int,
    ) -> None:
        self._tabulate = tabulate
        self._num_sequences = num_sequences
        self._num_known_columns = num_known_columns
        self.num_rows = 0
        self.reach(num_sequences)
        self._rows_s = float(self.table[0, num_sequences])
        self._column_s = float(self.table[1, num_sequences])
        self._asked, self._least_more = (0, 0), (0.0, 0.0)

    def reach(self, num_rows: int) -> None:
        """Let the table reach up to ``num_rows``."""
        if num_rows < self.num_rows:
            return
        self.num_rows = 2 * (num_rows + 1)
        self.table: FloatArray = self._tabulate(np.arange(float(self.num_rows)))
        self.address = address_of(self.table)

    def num_more_columns(self, num_columns: int) -> int:
        """How many of the cached tokens of all sequences cost something in addition."""
        return max(0, num_columns - self._num_known_columns)

    def plain_s(self, num_columns: int = 0) -> float:
        """Seconds for one row of each sequence.

        Args:
            num_columns: cached tokens of all sequences together.
        """
        return self._rows_s + self.num_more_columns(num_columns) * self._column_s

    def cheapest_draft_s(self, max_drafts: int, num_columns: int, num_other_rows: int) -> float:
        """A lower bound, in seconds, of what any single draft adds to a step: at most the smallest
        difference between neighbours in :func:`~hdserve.drafting.cutting.forward_s`.

        Args:
            max_drafts: at least one.
            num_columns: as for :meth:`plain_s`.
            num_other_rows: rows of prompts in the same forward.
        """
        if (max_drafts, num_other_rows) != self._asked:
            self._asked = max_drafts, num_other_rows
            self._least_more = self._least_differences(max_drafts, num_other_rows)
        row_s, column_s = self._least_more
        return row_s + self.num_more_columns(num_columns) * column_s

    def _least_differences(self, max_drafts: int, num_other_rows: int) -> tuple[float, float]:
        """The least that a draft adds to the seconds of all rows, and of each column."""
        alone, beside = self._num_sequences, self._num_sequences + num_other_rows
        self.reach(beside + max_drafts)
        rows_s = self.table[0, beside : beside + max_drafts + 1]
        column_s = self.table[1, alone : alone + max_drafts + 1]
        return float(np.diff(rows_s).min()), float(np.diff(column_s).min())
