"""What a forward costs is told between and beyond what was measured."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.drafting.cutting import forward_s
from tests.compiled import called

POINTS = st.dictionaries(st.integers(1, 64), st.floats(1e-6, 10.0), min_size=1, max_size=8)


def of_drafts(
    cost: BatchCost,
    num_drafts: int,
    num_sequences: int,
    *,
    num_columns: int = 0,
    num_other_rows: int = 0,
) -> npt.NDArray[np.float64]:
    """Seconds of forwards of 0, 1, ... ``num_drafts`` drafts."""
    step = cost.of(num_sequences)
    step.reach(num_sequences + num_other_rows + num_drafts)
    num_more = step.num_more_columns(num_columns)
    return np.array(
        [
            called(forward_s)(number, step.table, num_sequences, num_other_rows, num_more)
            for number in range(num_drafts + 1)
        ]
    )


def test_cost_is_interpolated_and_goes_on() -> None:
    """Between points the cost is a straight line, beyond the last one that of the last half goes
    on, and before the first one it is the first."""
    cost = ForwardCost({2: 1.0, 4: 2.0, 8: 3.0})
    assert cost([1, 2, 3, 4, 6, 8, 12]).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert float(ForwardCost({4: 2.0})(8)) == 4.0


def test_the_slope_that_goes_on_is_not_that_of_two_neighbours() -> None:
    cost = ForwardCost({1: 1.0, 8: 1.0, 16: 2.0, 17: 2.0})
    assert float(cost(26)) == 3.0
    assert float(ForwardCost({16: 2.0, 17: 2.0})(34)) == 4.0, "nothing else is known"


def test_a_cost_goes_on_as_another() -> None:
    alone = ForwardCost({1: 1.0, 4: 2.0, 8: 4.0})
    together = ForwardCost({2: 1.5, 4: 2.5}).going_on_as(alone)
    assert together([2, 4, 6, 8, 12]).tolist() == [1.5, 2.5, 3.5, 4.5, 6.5]
    assert alone.going_on_as(together)([1, 4, 8]).tolist() == [1.0, 2.0, 4.0]
    late = ForwardCost({7: 3.0}).going_on_as(alone)
    assert late([7, 8, 10]).tolist() == [3.0, 3.5, 4.5], "as alone, also beyond all points"
    assert late.scaled(2.0)([7, 8, 10]).tolist() == [6.0, 7.0, 9.0]


def test_cost_between_two_batches_is_interpolated() -> None:
    """By the number of sequences; outside what was measured the nearest counts."""
    cost = BatchCost({2: ForwardCost({2: 1.0}), 6: ForwardCost({6: 3.0})})
    assert [float(cost(2, number)) for number in (1, 2, 3, 6, 20)] == [1.0, 1.0, 1.5, 3.0, 3.0]


@given(POINTS)
def test_more_rows_never_cost_less(points: dict[int, float]) -> None:
    """A point that was measured too cheap does not make more rows cheaper than fewer."""
    seconds = ForwardCost(points)(list(range(1, 200))).tolist()
    assert all(math.isfinite(value) and value > 0 for value in seconds)
    for fewer, more in itertools.pairwise(seconds):
        assert more >= fewer * (1 - 1e-12)


def test_a_time_that_is_none_does_not_count() -> None:
    cost = ForwardCost({1: 1.0, 2: math.nan, 4: 2.0, 8: math.inf})
    assert cost([1, 2, 4]).tolist() == ForwardCost({1: 1.0, 4: 2.0})([1, 2, 4]).tolist()
    with pytest.raises(ValueError, match="finite"):
        ForwardCost({1: math.nan, 8: math.inf})


def test_columns_cost_what_the_rows_of_their_sequence_make_them_cost() -> None:
    """By how much the sequences are longer together than what was measured; rows of prompts do not
    look at them."""
    cost = BatchCost(
        {1: ForwardCost({1: 1.0, 2: 1.5, 40: 20.5})},
        num_columns=100,
        column_cost=ForwardCost({1: 0.01, 2: 0.03}),
    )
    assert of_drafts(cost, 2, 1).tolist() == [1.0, 1.5, 2.0]
    assert of_drafts(cost, 2, 1, num_columns=200).tolist() == pytest.approx([2.0, 4.5, 7.0])
    beside_prompt = of_drafts(cost, 2, 1, num_columns=200, num_other_rows=20)
    assert beside_prompt.tolist() == pytest.approx([2.0, 4.5, 7.0])
    two_sequences = of_drafts(cost, 2, 2, num_columns=220)
    assert two_sequences.tolist() == pytest.approx([1.5 + 0.2, 2.0 + 0.4, 2.5 + 0.6])
    assert cost.of(2).plain_s(220) == pytest.approx(1.7)


@given(POINTS, POINTS, st.integers(1, 5), st.integers(1, 30), st.integers(0, 20))
def test_no_draft_is_cheaper_than_the_cheapest(
    points: dict[int, float],
    of_column: dict[int, float],
    num_sequences: int,
    max_drafts: int,
    num_other_rows: int,
) -> None:
    """Whatever was asked before; and where sequences are no longer than what was measured, one
    draft is as cheap."""
    cost = BatchCost({1: ForwardCost(points)}, num_columns=64, column_cost=ForwardCost(of_column))
    for num_columns in (0, 500 * num_sequences, 0):
        more_s = np.diff(
            of_drafts(
                cost,
                max_drafts,
                num_sequences,
                num_columns=num_columns,
                num_other_rows=num_other_rows,
            )
        )
        least_s = cost.of(num_sequences).cheapest_draft_s(max_drafts, num_columns, num_other_rows)
        slack = 1e-9 * max(1.0, float(more_s.max()))
        assert least_s <= more_s.min() + slack
        if not num_columns:
            assert least_s == pytest.approx(more_s.min(), abs=slack)


@given(POINTS, POINTS, st.integers(1, 5), st.integers(0, 30), st.integers(0, 5000))
def test_more_drafts_and_longer_sequences_never_cost_less(
    points: dict[int, float],
    of_column: dict[int, float],
    num_sequences: int,
    num_drafts: int,
    num_columns: int,
) -> None:
    """Whatever was asked before."""
    cost = BatchCost({1: ForwardCost(points)}, num_columns=64, column_cost=ForwardCost(of_column))
    of_drafts(cost, 3, num_sequences, num_columns=num_columns)
    shorter, longer = (
        of_drafts(cost, num_drafts, num_sequences, num_columns=number)
        for number in (num_columns, 2 * num_columns)
    )
    assert len(shorter) == num_drafts + 1
    assert (longer >= shorter).all()
    for number, seconds in ((num_columns, shorter), (2 * num_columns, longer)):
        assert cost.of(num_sequences).plain_s(number) == pytest.approx(seconds[0])
    for fewer, more in itertools.pairwise(longer.tolist()):
        assert more >= fewer * (1 - 1e-12)


def test_all_of_a_scaled_cost_takes_as_much_longer() -> None:
    """Few rows and many, of short sequences and long ones, beside prompts and beyond what was
    measured."""
    points = {1: 1.0, 4: 1.5, 16: 3.0}
    cost = BatchCost(
        {1: ForwardCost(points), 4: ForwardCost({4: 2.0, 16: 4.0})},
        num_columns=64,
        column_cost=ForwardCost({1: 0.01, 16: 0.02}),
        reading_share=0.05,
    )
    scaled = cost.scaled(0.25)
    for number, num_columns, num_other_rows in ((1, 0, 0), (3, 900, 0), (4, 64, 40)):
        where = {"num_columns": num_columns, "num_other_rows": num_other_rows}
        found, whole = of_drafts(scaled, 30, number, **where), of_drafts(cost, 30, number, **where)
        np.testing.assert_allclose(found, 0.25 * whole)
        assert scaled.of(number).plain_s(num_columns) == pytest.approx(
            0.25 * cost.of(number).plain_s(num_columns)
        )
    assert scaled.reading_share == cost.reading_share
