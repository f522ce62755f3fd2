"""The cost of a forward is measured at useful sizes, and leaves no trace."""

from __future__ import annotations

import pytest

from hdserve.config import EngineConfig
from hdserve.engine.forward_cost import _row_counts, measure_forward_cost
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
    cost = measure_forward_cost(runner, max_rows)
    assert runner.cache.usage == 0.0
    seconds = cost([1, max_rows, 1000])
    assert 0 < seconds[0] <= seconds[1] <= seconds[2]
