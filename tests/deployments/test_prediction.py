"""How much of a prediction came, against the textbook's table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import prediction
from deployments.prediction import PredictionCounts, count_prediction, num_common
from hdserve import core
from hdserve.core import SamplingParams, SpeculationParams

TOKENS = st.lists(st.integers(0, 4), max_size=80)


def by_table(first: Sequence[int], second: Sequence[int]) -> int:
    above = [0] * (len(second) + 1)
    for mine in first:
        row = [0]
        for index, other in enumerate(second):
            row.append(above[index] + 1 if mine == other else max(above[index + 1], row[-1]))
        above = row
    return above[-1]


@given(TOKENS, TOKENS)
def test_it_is_the_longest_common_subsequence(first: list[int], second: list[int]) -> None:
    assert num_common(first, second) == by_table(first, second)


@pytest.mark.parametrize(
    ("predicted", "output", "wanted"),
    [
        ((1, 2, 3), (1, 2, 3), (3, 0)),
        ((1, 2, 3, 4), (9, 1, 3, 4, 9), (3, 1)),
        ((1, 2), (2, 1), (1, 1)),
        ((1, 2), (), (0, 2)),
        ((), (1, 2), (0, 0)),
    ],
)
def test_each_choice_is_compared(
    predicted: tuple[int, ...], output: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    """With the whole prediction; what is the same in the prompt does not count."""
    speculation = SpeculationParams(prediction=predicted)
    sequences = [core.Sequence(str(i), [1, 2, 3], SamplingParams(), speculation) for i in range(2)]
    for seq in sequences:
        seq.token_ids += output
    assert count_prediction(sequences[:1]) == PredictionCounts(*wanted)
    assert count_prediction(sequences) == PredictionCounts(2 * wanted[0], 2 * wanted[1])


def test_of_long_texts_a_part_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they begin and end with alike, and the first tokens of the rest."""
    monkeypatch.setattr(prediction, "MAX_COMPARED", 3)
    alike, first, second = [1, 2] * 9, [3, 4, 5, 6, 7], [8, 3, 5, 9, 7, 6]
    assert num_common(first, second) == 2
    assert num_common([*alike, *first, *alike], [*alike, *second, *alike]) == 36 + 2
    assert num_common(alike, [*alike, *second]) == 18
