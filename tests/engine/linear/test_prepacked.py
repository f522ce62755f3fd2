"""Layers of prepacked weights are the layers they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from hdserve.engine.kernels.pairs import NUM_PAIRED
from hdserve.engine.kernels.prepacked_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.kernels.registers import HAS_AVX2_ALONE
from hdserve.engine.linear.prepacked import PrepackedLinear, can_prepack, prepacked_kernel
from tests.engine.linear.test_skinny import step

needs_kernel = pytest.mark.skipif(
    prepacked_kernel(torch.bfloat16) is None, reason="no kernel of this processor prepacks weights"
)
pytestmark = needs_kernel

DTYPES = [dtype for dtype in (torch.bfloat16, torch.float32) if prepacked_kernel(dtype)]


def make_layer(
    num_inputs: int,
    num_outputs: int,
    *,
    has_bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.nn.Linear:
    layer = torch.nn.Linear(num_inputs, num_outputs, bias=has_bias)
    return layer.to(dtype).requires_grad_(False)


SIZES = [(1, 1, 512), (1, 7, 512), (2, 3, 512), (40, 512), (1, 0, 512)]
OUTPUTS = [64, 77, 128, 1_039]


def make_cases() -> Iterator[tuple[tuple[int, ...], int, bool, int, torch.dtype]]:
    """Sizes, streams and dtypes in full, and in turn either every other number of outputs or those
    between: of two, one layer has a bias, in turn this or that."""
    for at, number, which in product(range(len(SIZES)), range(2), range(len(DTYPES))):
        for place in range(2):
            num_outputs = OUTPUTS[2 * place + (at + number + which) % 2]
            yield SIZES[at], num_outputs, (at + place) % 2 == 1, number + 1, DTYPES[which]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(
    ("size", "num_outputs", "has_bias", "num_streams", "dtype"), list(make_cases()), ids=str
)
@torch.inference_mode()
def test_it_is_the_layer(
    size: tuple[int, ...], num_outputs: int, has_bias: bool, num_streams: int, dtype: torch.dtype
) -> None:
    layer = make_layer(512, num_outputs, has_bias=has_bias, dtype=dtype)
    rows = torch.randn(size).to(dtype)
    wanted = layer(rows)
    prepacked = PrepackedLinear(layer, num_streams)
    with step():
        found = prepacked(rows)
    assert torch.equal(prepacked(rows), found), "outside a step it is the kernel's, too"
    assert torch.equal(prepacked.weight, layer.weight)
    assert torch.equal(prepacked(rows), wanted), "by the weights, once somebody asked for them"
    with step():
        assert torch.equal(prepacked(rows), found)
    assert found.shape == wanted.shape
    error = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_is_its_own_whatever_shapes_are_exact(dtype: torch.dtype) -> None:
    layer = PrepackedLinear(make_layer(256, 352, dtype=dtype))
    rows = torch.randn(300, 256).to(dtype)
    with step():
        few = layer(rows[7:8])
    with step(is_exact=True):
        assert torch.equal(layer(rows)[7:8], few)


def test_weights_are_unpacked_once() -> None:
    """Models may ask for them in every forward."""
    layer = make_layer(64, 80)
    prepacked = PrepackedLinear(layer)
    assert prepacked.weight is prepacked.weight
    assert torch.equal(prepacked.weight, layer.weight)


def test_layers_are_told_apart() -> None:
    assert can_prepack(make_layer(64, 80, has_bias=True))
    assert can_prepack(make_layer(64, OUTPUTS_PER_BLOCK + 1)), "blocks may overlap"
    assert not can_prepack(make_layer(64, OUTPUTS_PER_BLOCK - 1)), "no whole block"
    assert not can_prepack(make_layer(64 + NUM_PAIRED // 2, 80)), "inputs are multiplied in pairs"
    assert can_prepack(make_layer(64, 80).float()) == HAS_AVX2_ALONE
    assert not can_prepack(make_layer(64, 80).half())
    layer = make_layer(64, 80, has_bias=True)
    layer.bias = torch.nn.Parameter(layer.bias.float(), requires_grad=False)
    assert not can_prepack(layer)
