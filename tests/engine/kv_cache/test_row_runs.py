"""Runs are found whole, and the part of one that moves least."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from hdserve.engine.kv_cache.row_runs import RowRun, cheapest_part, find_runs
from hdserve.engine.kv_cache.segments import Segment


def runs_of(layout: str) -> list[RowRun]:
    """Of one letter a row: ``.`` is free, ``#`` runs, others ended."""
    gaps, ended, start = [], [], 0
    for letter, rows in groupby(layout):
        segment = Segment(start, len(list(rows)))
        start = segment.end
        if letter != "#":
            (gaps if letter == "." else ended).append(segment)
    return find_runs(reversed(gaps), reversed(ended))


def test_running_sequences_are_between_runs() -> None:
    runs = runs_of("..aa.b#c.##dd")
    assert [(run.start, run.end) for run in runs] == [(0, 6), (7, 9), (11, 13)]
    assert [run.num_rows for run in runs] == [6, 2, 2]
    assert [run.num_ended_rows for run in runs] == [3, 1, 2]
    assert runs[0].ended == [Segment(2, 2), Segment(5, 1)]
    assert runs_of("") == runs_of("###") == []


def test_the_fewest_rows_move() -> None:
    runs = runs_of("..aaa..bb.#...c..dddd.")
    parts = {number: cheapest_part(runs, number) for number in (3, 4, 5, 6)}
    assert {number: part and (part.start, part.end) for number, part in parts.items()} == {
        3: (11, 14),
        4: (11, 17),
        5: (11, 17),
        6: (11, 22),
    }
    assert cheapest_part(runs, 7) is None


@given(layout=st.text("...aab#", max_size=40), num_rows=st.integers(1, 12))
def test_no_cheaper_part_is_missed(layout: str, num_rows: int) -> None:
    """Of all parts there are."""
    runs = runs_of(layout)
    parts = [
        RowRun(run.pieces[first:end])
        for run in runs
        for first in range(len(run.pieces))
        for end in range(first + 1, len(run.pieces) + 1)
    ]
    costs = [
        part.num_ended_rows for part in parts if part.num_rows - part.num_ended_rows >= num_rows
    ]
    part = cheapest_part(runs, num_rows)
    assert (part and part.num_ended_rows) == min(costs, default=None)
    assert part is None or part.num_rows - part.num_ended_rows >= num_rows
