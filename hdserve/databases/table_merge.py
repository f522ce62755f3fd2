"""Adding the counts of several tables, and how often they are halved before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import fast_inlined, jit
from hdserve.databases.ngram import (
    BUCKET_ROWS,
    COUNT_SHIFT,
    FIRST_SLOT,
    MAX_COUNT,
    MAX_TOTAL,
    NUM_SLOTS,
    ROW_WORDS,
    TOKEN_MASK,
    TOTAL_MASK,
    Ints,
    Rows,
    claim_row,
    count_token,
    grow,
    halve,
    set_total,
    total_of,
)
from hdserve.databases.statistics import StatisticsDatabase

_ROWS_AT_ONCE = 1 << 18
_SHIFT_32 = np.uint64(32)
_ZERO = np.uint32(0)


class CountShifts(NamedTuple):
    """Contexts whose counts would not fit into one row when added, and how often the counts of each
    table are halved so that they fit: equally often in all tables, so that the shares and ranks of
    the sum are those of all texts counted together, in whatever order tables are added.

    Attributes:
        hashes: uint64 ``[num_contexts]``, ascending.
        times: int64 ``[num_contexts]``.
    """

    hashes: npt.NDArray[np.uint64]
    times: Ints


NO_COUNT_SHIFTS = CountShifts(np.empty(0, np.uint64), np.empty(0, np.int64))


def find_count_shifts(databases: Sequence[StatisticsDatabase]) -> CountShifts:
    """The shifts that make counts of ``databases``, which are read twice, fit; most contexts need
    none."""
    hashes = _with_many(databases)
    totals = np.zeros(len(hashes), np.int64)
    likeliest = np.zeros(len(hashes), np.int64)
    for rows in _pieces(databases) if len(hashes) else ():
        of_rows = _hashes(rows)
        places = np.minimum(np.searchsorted(hashes, of_rows), len(hashes) - 1)
        is_found = hashes[places] == of_rows
        np.add.at(totals, places[is_found], _totals(rows)[is_found])
        np.add.at(likeliest, places[is_found], _likeliest(rows)[is_found])
    times = np.zeros(len(hashes), np.int64)
    while (is_too_much := (likeliest >> times > MAX_COUNT) | (totals >> times > MAX_TOTAL)).any():
        times[is_too_much] += 1
    return CountShifts(hashes[times > 0], times[times > 0])


def _with_many(databases: Sequence[StatisticsDatabase]) -> npt.NDArray[np.uint64]:
    """The hashes, ascending, of contexts with so many counts in some table that the sum over all
    tables may not fit."""
    found = [np.empty(0, np.uint64)]
    for rows in _pieces(databases):
        has_many = _likeliest(rows) > MAX_COUNT // len(databases)
        has_many |= _totals(rows) > MAX_TOTAL // len(databases)
        found.append(np.unique(_hashes(rows[has_many])))
    return np.unique(np.concatenate(found))


def _pieces(databases: Sequence[StatisticsDatabase]) -> Iterator[Rows]:
    """Yield the rows in use of all tables, a bounded number at a time."""
    for database in databases:
        num_rows = database.info.num_buckets * BUCKET_ROWS
        for first in range(0, num_rows, _ROWS_AT_ONCE):
            rows = database.rows[first : min(first + _ROWS_AT_ONCE, num_rows)]
            yield rows[rows[:, 0] != 0]


def _hashes(rows: Rows) -> npt.NDArray[np.uint64]:
    return rows[:, 0].astype(np.uint64) | (rows[:, 1].astype(np.uint64) << _SHIFT_32)


def _totals(rows: Rows) -> Ints:
    return (rows[:, 2] & TOTAL_MASK).astype(np.int64)


def _likeliest(rows: Rows) -> Ints:
    """The count of the likeliest token of each row."""
    return (rows[:, FIRST_SLOT] >> COUNT_SHIFT).astype(np.int64)


@fast_inlined
def _times_of(context_hash: np.uint64, hashes: npt.NDArray[np.uint64], times: Ints) -> int:
    """How often the counts of a context are to be halved: its entry of ``times`` if it is among
    ``hashes``, which ascend, else 0."""
    first, end = 0, len(hashes)
    while first < end:
        middle = (first + end) // 2
        if hashes[middle] < context_hash:
            first = middle + 1
        else:
            end = middle
    return times[first] if first < len(hashes) and hashes[first] == context_hash else 0


@fast_inlined
def _shifts_to_fit(total: int, count: int, target: Rows, row: int) -> int:
    """How often a row, and counts of its context to be added, must be halved to fit; ``count`` is
    the largest of these."""
    total += total_of(target, row)
    count += np.int64(target[row, FIRST_SLOT] >> COUNT_SHIFT)
    times = 0
    while count >> times > MAX_COUNT or total >> times > MAX_TOTAL:
        times += 1
    return times


@jit
def merge_tables(
    source: Rows,
    num_buckets: int,
    hashes: npt.NDArray[np.uint64],
    times: Ints,
    target: Rows,
    target_size: Ints,
    stamp: int,
) -> None:
    """Add the counts of every row of ``source`` to ``target``.  Rows that would overflow are halved
    first, both of them and their totals, so that all shares stay the same.

    Args:
        hashes, times: contexts whose counts are halved in any case, and how often; see
            :class:`CountShifts`.
    """
    for index in range(num_buckets * BUCKET_ROWS):
        if source[index, 0] == _ZERO:
            continue
        context_hash = np.uint64(source[index, 0]) | (np.uint64(source[index, 1]) << _SHIFT_32)
        row = claim_row(target, target_size, context_hash, stamp, 0)
        shift = _times_of(context_hash, hashes, times)
        total = total_of(source, index) >> shift
        likeliest = np.int64(source[index, FIRST_SLOT] >> COUNT_SHIFT) >> shift
        more = _shifts_to_fit(total, likeliest, target, row)
        total >>= more
        if more > 0:
            set_total(target, row, halve(target, row, more), stamp)
        total += total_of(target, row)
        for back in range(NUM_SLOTS):  # the likeliest last, which puts it before equal ones
            word = source[index, ROW_WORDS - 1 - back]
            count = np.int64(word >> COUNT_SHIFT) >> (shift + more)
            if count > 0:
                count_token(target, row, np.int64(word & TOKEN_MASK), count, stamp)
        set_total(target, row, total, stamp)
        grow(target, target_size, 0)
