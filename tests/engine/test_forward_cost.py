"""The cost of a forward is measured at useful sizes, and leaves no trace."""

from __future__ import annotations

import itertools

import pytest

from hdserve.config import EngineConfig
from hdserve.engine.forward_cost import _points, _row_counts, measure_forward_cost
from hdserve.engine.kv_cache import KVCache
from hdserve.engine.loader import prepare_model
from hdserve.engine.model_runner import ModelRunner
from tests.models import make_model


def make_runner(num_rows: int = 512, max_model_len: int | None = None) -> ModelRunner:
    model = prepare_model(make_model(), EngineConfig(max_model_len=max_model_len))
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
        assert runner.cache.usage == 0.0
        for num_sequences in (1, 3, 8):
            seconds = cost([1, max_rows, 1000], num_sequences)
            assert 0 < seconds[0] <= seconds[1] <= seconds[2]


@pytest.mark.parametrize("max_num_sequences", [1, 2, 3, 16, 24])
def test_batches_are_measured_up_to_the_largest(max_num_sequences: int) -> None:
    """One sequence, the most there can be, and some between; each with no drafts and with most."""
    points = {(point.num_sequences, point.num_rows) for point in _points(17, max_num_sequences)}
    numbers = sorted({number for number, _ in points})
    assert (numbers[0], numbers[-1]) == (1, max_num_sequences)
    assert all(high <= 2 * low for low, high in itertools.pairwise(numbers))
    assert all({(number, 1), (number, 17)} <= points for number in numbers)
