"""The cost of a forward is measured at useful sizes, and leaves no trace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hdserve.config import EngineConfig
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment, align
from hdserve.engine.loading import forward_cost
from hdserve.engine.loading.forward_cost import (
    _other_points,
    _row_counts,
    measure_forward_cost,
    num_rows_to_measure,
)
from hdserve.engine.loading.loader import prepare_model
from tests.models import make_model


def make_runner(
    num_rows: int = 512, max_model_len: int | None = None, **options: int
) -> ModelRunner:
    model = prepare_model(make_model(**options), EngineConfig(max_model_len=max_model_len))
    return ModelRunner(model, KVCache(model.kv_shape, num_rows, model.dtype, model.device))


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 13, 17, 64])
def test_sizes_reach_the_largest_tree(max_rows: int) -> None:
    """One row, the largest tree, and sizes between them where kernels change, are tried."""
    counts = list(_row_counts(max_rows))
    assert {1, max_rows} <= set(counts)
    assert max(counts) < 2 * max_rows or max_rows == 1
    for small in range(1, max_rows):
        assert any(small <= count <= max(small * 1.5, small + 1) for count in counts)


@pytest.mark.parametrize(
    ("num_rows", "max_model_len", "max_rows"),
    [(512, None, 17), (32, None, 17), (512, 2, 17), (512, 20, 200), (32, None, 32)],
)
def test_any_cache_and_context_will_do(
    num_rows: int, max_model_len: int | None, max_rows: int
) -> None:
    """The measurement fits into small caches and short contexts, and gives everything back."""
    runner = make_runner(num_rows, max_model_len)
    for max_num_sequences in (1, 3):
        cost = measure_forward_cost(runner, max_rows, max_num_sequences)
        assert cost.reading_share > 0
        assert runner.cache.rows.num_free == runner.cache.num_rows
        for num_sequences in (1, 3, 8):
            seconds = cost([1, max_rows, 1000], num_sequences)
            assert 0 < seconds[0] <= seconds[1] <= seconds[2]


@pytest.mark.parametrize("max_num_sequences", [1, 2, 3, 16, 24])
def test_batches_are_measured_up_to_the_largest(max_num_sequences: int) -> None:
    """Up to the most sequences there can be, some numbers between, and one that is long; each with
    no drafts and with most."""
    found = list(_other_points(17, max_num_sequences, 100, 1000))
    points = {(point.num_sequences, point.num_rows) for point in found}
    numbers = sorted({number for number, _ in points})
    assert (numbers[0], numbers[-1]) == (1, max_num_sequences)
    assert all(high <= 2 * low for low, high in itertools.pairwise(numbers))
    assert all({(number, 1), (number, 17)} <= points for number in numbers)
    assert {point.num_columns for point in found if point.num_sequences == 1} == {1000}


@pytest.mark.parametrize("slope", [0.01, 0.125])
@pytest.mark.parametrize("slowness", [0.01, 0.03, 0.05, 0.1, 0.3, 1.0])
def test_a_slow_model_is_said_to_cost_what_it_does(
    monkeypatch: pytest.MonkeyPatch, slowness: float, slope: float
) -> None:
    """There is time for some sizes only.  Each row adds to a forward what it adds, and a column
    what it adds for each row; the first forward of all takes longer."""
    others_s = 0.0
    is_first = True

    def true_s(point: Any) -> float:
        columns = 1e-6 * point.num_columns * point.num_rows
        return slowness * (1 + slope * point.num_rows_together + columns)

    def time_forward(_runner: object, point: Any) -> float:
        nonlocal others_s, is_first
        if point.num_sequences > 1 or point.num_columns > 128:
            others_s += true_s(point)
        elapsed = true_s(point) + (3.0 if is_first else 0.0)
        is_first = False
        return elapsed

    monkeypatch.setattr(forward_cost, "_time_forward", time_forward)
    runner = make_runner(num_rows_to_measure(17, 16), max_position_embeddings=2048)
    cost = measure_forward_cost(runner, 17, 16)
    assert others_s <= 1.05 * 4 * forward_cost._MAX_ROUND_S
    for num_sequences in (1, 2, 5, 8, 16):
        for num_rows in (1, 2, 5, 17):
            point = forward_cost._Point(num_sequences, num_rows, 128)
            found = float(cost([point.num_rows_together], num_sequences)[0])
            assert found == pytest.approx(true_s(point), rel=0.1)
    if cost._column_cost is not None:
        assert float(cost._column_cost(17)) == pytest.approx(slowness * 17e-6)


def test_what_there_is_no_time_for_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a cache take some as soon as they are written."""
    runner = make_runner(num_rows_to_measure(17, 16), max_position_embeddings=2048)
    clear, cleared = runner.cache.clear, list[Segment]()
    monkeypatch.setattr(runner.cache, "clear", lambda rows: cleared.append(rows) or clear(rows))
    monkeypatch.setattr(forward_cost, "_MAX_ROUND_S", 0.0)
    measure_forward_cost(runner, 17, 16)
    assert max(segment.end for segment in cleared) <= align(128 + 17)


def test_long_sequences_are_measured_where_there_is_room() -> None:
    """A cache for all that is measured tells what columns cost; a small one that nobody knows."""
    for num_rows, is_known in [(num_rows_to_measure(17, 1), True), (128, False)]:
        cost = measure_forward_cost(make_runner(num_rows, max_position_embeddings=2048), 17)
        assert (cost._column_cost is not None) == is_known
