"""A growing table of n-grams in bounded memory."""

from __future__ import annotations

import numpy as np

from hdserve.databases.cache_lines import MAPPED_BYTES, give_back_pages
from hdserve.databases.ngram import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    MAX_STAMP,
    NUM_ADDED,
    NUM_BUCKETS,
    ROWS_PER_BUCKET,
    Rows,
    new_rows,
    new_size,
    rebase_stamps,
    remove_buckets,
)

MIN_BUCKETS = 16
MAX_COPIED_BYTES = 1 << 22
"""A table that may become larger than this reserves all its address space when it outgrows a
quarter of it, so that nothing larger is copied while others wait."""

STAMPS_PER_TURNOVER = 128
"""How many stamps a row ages by while the table's number of contexts is added."""


class NgramTable:
    """A growing n-gram table, see :mod:`hdserve.databases.ngram`, and the clock its rows age by.

    Args:
        max_bytes: limit of the table, rounded down to a bucket.
        reserve_bytes: address space to begin with; :meth:`reserve_more` adds to it.

    Attributes:
        max_buckets: most buckets in use, see :meth:`limit`.
        rows: ``uint32[reserved rows, 16]``, those that may be used.
        num_reserved: buckets for which address space is reserved.
        size: ``int64[2]``: buckets in use, contexts added since the table was empty or limited.
        stamp: the age mark for rows that are written now; see :meth:`advance_stamp`.
    """

    def __init__(self, max_bytes: int, reserve_bytes: int = 1 << 20) -> None:
        self._most_buckets = self.max_buckets = max(1, max_bytes // BUCKET_BYTES)
        self._hold(new_rows(min(self.max_buckets, max(1, reserve_bytes // BUCKET_BYTES))))
        self.size = new_size(min(MIN_BUCKETS, self.num_reserved))
        self.stamp = 1
        self._next_stamp_at = self._stamp_interval

    def _hold(self, reserve: Rows) -> None:
        """Use these rows; if they are mapped, the system only backs those that were touched with
        memory."""
        self._reserve = reserve
        self.rows = reserve[: self.max_buckets * BUCKET_ROWS]
        self.num_reserved = len(reserve) // BUCKET_ROWS
        self._is_mapped = reserve.nbytes >= MAPPED_BYTES

    @property
    def num_buckets(self) -> int:
        """Buckets in use."""
        return self.size.item(NUM_BUCKETS)

    @property
    def num_bytes(self) -> int:
        """Memory in use, including reserved memory that is resident."""
        num_buckets = self.num_buckets if self._is_mapped else self.num_reserved
        return num_buckets * BUCKET_BYTES

    def is_reserve_low(self, num_new: int) -> bool:
        """Whether :meth:`reserve_more` must be called for the table to grow while ``num_new``
        contexts are added."""
        if self.num_reserved >= self.max_buckets:
            return False
        return self._num_wanted(num_new) * 8 > self.num_reserved * 7

    def _num_wanted(self, num_new: int) -> int:
        """Buckets in use after ``num_new`` more contexts, if there is room."""
        return (self.size.item(NUM_ADDED) + num_new) // ROWS_PER_BUCKET

    def count_rows(self) -> int:
        """Contexts held now; reads the whole table."""
        return int(np.count_nonzero(self.rows[: self.num_buckets * BUCKET_ROWS, 0]))

    def reserve_more(self, num_new: int = 0) -> None:
        """Move to four times as many rows (a plain copy of those in use), or to all the table may
        ever need if that would be more than ``MAX_COPIED_BYTES``.

        If reserved memory is resident, only half as many more are added, or what ``num_new``
        contexts need, and never more than the table may take now.
        """
        num_few = max(self.num_reserved * 3 // 2, self._num_wanted(num_new) * 8 // 7) + 1
        if self._is_mapped:
            num_buckets = self.num_reserved * 4
        elif num_few * BUCKET_BYTES < MAPPED_BYTES:
            num_buckets = min(num_few, self.max_buckets)
        else:
            num_buckets = MAPPED_BYTES // BUCKET_BYTES
        if num_buckets * BUCKET_BYTES > MAX_COPIED_BYTES:
            num_buckets = self._most_buckets
        self._move(min(self._most_buckets, num_buckets))

    def _move(self, num_reserved: int) -> None:
        """Replace the rows by another array with the same content."""
        rows = new_rows(num_reserved)
        in_use = self.num_buckets * BUCKET_ROWS
        rows[:in_use] = self._reserve[:in_use]
        self._hold(rows)

    def warm_up(self) -> None:
        """Compile, or load, functions that are rarely called; changes nothing."""
        rebase_stamps(self.rows, 0, 0)
        remove_buckets(self.rows, self.size, self.max_buckets, self.stamp)

    @property
    def _stamp_interval(self) -> int:
        return max(1, self.max_buckets * ROWS_PER_BUCKET // STAMPS_PER_TURNOVER)

    def advance_stamp(self) -> None:
        """Let rows age as the table turns over; call it now and then."""
        num_added = self.size.item(NUM_ADDED)
        if num_added < self._next_stamp_at:
            return
        self._next_stamp_at = num_added + self._stamp_interval
        self.stamp += 1
        if self.stamp == MAX_STAMP:
            change = MAX_STAMP // 2
            rebase_stamps(self.rows, self.num_buckets, change)
            self.stamp -= change

    def limit(self, max_bytes: int) -> int:
        """Take no more than ``max_bytes`` from now on, at most the limit the table was created with
        and at least a bucket: the least valuable rows are given up, their memory returns to the
        system, and ``rows`` is another array.

        Returns:
            How many contexts were given up.
        """
        self.max_buckets = min(self._most_buckets, max(1, max_bytes // BUCKET_BYTES))
        num_before = self.num_buckets
        num_given_up = remove_buckets(self.rows, self.size, self.max_buckets, self.stamp)
        self.size[NUM_ADDED] = min(self.size[NUM_ADDED], self.num_buckets * ROWS_PER_BUCKET)
        self._next_stamp_at = self.size.item(NUM_ADDED) + self._stamp_interval
        self.rows = self._reserve[: self.max_buckets * BUCKET_ROWS]
        if not self._is_mapped and self.num_reserved > self.max_buckets:
            self._move(self.max_buckets)
        elif self.num_buckets < num_before:
            give_back_pages(self._reserve[self.num_buckets * BUCKET_ROWS :])
        return int(num_given_up)
