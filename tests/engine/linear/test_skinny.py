"""Layers that multiply few rows by the kernel are the layers they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import build_batch
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_context import running
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.engine.linear.layers import are_rows_independent
from hdserve.engine.linear.skinny import (
    SkinnyLinear,
    can_multiply,
    multiply_rows,
)
from hdserve.engine.loading.exactness import choose_shapes, find_exact_shapes
from hdserve.engine.loading.loader import load_model
from tests.engine.caches import make_cache


@contextmanager
def step(is_exact: bool = False) -> Iterator[None]:
    cache = make_cache(32)
    chunk = Chunk(Segment(0, 32), 0, [1], None)
    shapes = Shapes(is_exact=is_exact)
    with running(build_batch([chunk], cache, shapes, None, Workers()).plan):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 64), (1, 7, 64), (2, 3, 64), (5, 64), (1, 0, 64)])
@torch.inference_mode()
def test_it_is_the_layer(dtype: torch.dtype, has_bias: bool, size: tuple[int, ...]) -> None:
    layer = torch.nn.Linear(64, 20, bias=has_bias).to(dtype).requires_grad_(False)
    rows = torch.randn(size).to(dtype)
    wanted = layer(rows)
    found_layer = SkinnyLinear(layer, torch.tensor(32))
    assert torch.equal(found_layer(rows), wanted), "outside a step it is PyTorch's"
    with step():
        found = found_layer(rows)
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["strided", "float32"])
@torch.inference_mode()
def test_a_bias_may_lie_anywhere(kind: str) -> None:
    rows, weight = torch.randn(5, 64).bfloat16(), torch.randn(20, 64).bfloat16()
    bias = torch.randn(20) if kind == "float32" else torch.randn(20, 2).bfloat16()[:, 0]
    found = multiply_rows(rows, weight, Workers(), bias)
    wanted = rows.float() @ weight.float().T + bias.float()
    torch.testing.assert_close(found.float(), wanted, atol=2e-2, rtol=2e-2)


@torch.inference_mode()
def test_many_rows_are_multiplied_by_the_library_unless_exact() -> None:
    layer = torch.nn.Linear(512, 256).requires_grad_(False)
    rows = torch.randn(33, 512)
    with step():
        assert torch.equal(
            SkinnyLinear(layer, torch.tensor(32))(rows), F.linear(rows, layer.weight, layer.bias)
        )
        few = SkinnyLinear(layer, torch.tensor(32))(rows[:5])
    with step(is_exact=True):
        assert torch.equal(SkinnyLinear(layer, torch.tensor(32))(rows)[:5], few)


@pytest.mark.parametrize("num_threads", [2, 3])
@torch.inference_mode()
def test_threads_change_nothing(num_threads: int) -> None:
    layer = torch.nn.Linear(512, 1024).requires_grad_(False)
    rows = torch.randn(9, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with step():
            alone = SkinnyLinear(layer, torch.tensor(32))(rows)
        torch.set_num_threads(num_threads)
        with step():
            assert torch.equal(SkinnyLinear(layer, torch.tensor(32))(rows), alone)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_one_row_and_many_are_multiplied_by_column() -> None:
    layer = torch.nn.Linear(512, 256).requires_grad_(False)
    by_column = layer.weight.t().contiguous().t()
    found = SkinnyLinear(layer, torch.tensor(32), by_column)
    rows = torch.randn(1, 40, 512)
    with step():
        for some in (rows[:, :1], rows):
            assert torch.equal(found(some), F.linear(some, by_column, layer.bias))
        assert torch.equal(found(rows[:, :5]), SkinnyLinear(layer, torch.tensor(32))(rows[:, :5]))


def test_layers_are_told_apart() -> None:
    """The kernel does not know all sizes."""
    known, odd_inputs, odd_outputs = (
        torch.nn.Linear(*sizes) for sizes in ((64, 20), (20, 20), (64, 22))
    )
    assert [can_multiply(layer) for layer in (known, odd_inputs, odd_outputs)] == [
        True,
        False,
        False,
    ]


class OtherStorage(torch.Tensor):
    """As quantised weights are: a tensor by its looks, whose numbers lie elsewhere."""


def test_weights_that_only_look_like_numbers_stay() -> None:
    layer = torch.nn.Linear(64, 20).requires_grad_(False)
    assert can_multiply(layer)
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(OtherStorage), False)
    assert not can_multiply(layer)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_models_need_no_row_counts(dtype: Literal["float32", "bfloat16"]) -> None:
    """With kernels for attention and linear layers a forward may have any number of rows."""
    engine = EngineConfig(exact=True, dtype=dtype)
    model = load_model(ModelConfig(name="mini", model="hdserve-mini", engine=engine))
    runner = ModelRunner(model, KVCache(model.kv_shape, 1024, model.dtype, model.device))
    assert are_rows_independent(model.module)
    assert find_exact_shapes(runner, Shapes(is_exact=True)) == Shapes(is_exact=True)
    assert choose_shapes(runner, 64, exact=True) == Shapes(is_exact=True)
