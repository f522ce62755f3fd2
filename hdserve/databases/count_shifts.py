"""How often the counts of several tables are halved before they are added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.databases.ngram import (
    BUCKET_ROWS,
    COUNT_SHIFT,
    FIRST_SLOT,
    MAX_COUNT,
    MAX_TOTAL,
    Ints,
    Rows,
)
from hdserve.databases.statistics import StatisticsDatabase

_ROWS_AT_ONCE = 1 << 18
_TOTAL_MASK = 0xFFFF


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
    return rows[:, 0].astype(np.uint64) | (rows[:, 1].astype(np.uint64) << np.uint64(32))


def _totals(rows: Rows) -> Ints:
    return (rows[:, 2] & _TOTAL_MASK).astype(np.int64)


def _likeliest(rows: Rows) -> Ints:
    """The count of the likeliest token of each row."""
    return (rows[:, FIRST_SLOT] >> COUNT_SHIFT).astype(np.int64)
