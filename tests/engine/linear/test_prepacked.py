"""Layers of prepacked weights are the layers they stand for."""

from __future__ import annotations

import pytest
import torch

from hdserve.engine.kernels.registers import HAS_AVX512_BF16
from hdserve.engine.linear.prepacked import PrepackedLinear, can_prepack
from tests.engine.linear.test_skinny import step

pytestmark = pytest.mark.skipif(not HAS_AVX512_BF16, reason="the processor has no AVX-512 BF16")


def make_layer(num_inputs: int, num_outputs: int, *, has_bias: bool = False) -> torch.nn.Linear:
    layer = torch.nn.Linear(num_inputs, num_outputs, bias=has_bias)
    return layer.bfloat16().requires_grad_(False)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [64, 80, 128, 1_040])
@pytest.mark.parametrize("size", [(1, 1, 512), (1, 7, 512), (2, 3, 512), (40, 512), (1, 0, 512)])
@torch.inference_mode()
def test_it_is_the_layer(
    size: tuple[int, ...], num_outputs: int, has_bias: bool, num_streams: int
) -> None:
    layer = make_layer(512, num_outputs, has_bias=has_bias)
    rows = torch.randn(size).bfloat16()
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
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


@torch.inference_mode()
def test_a_row_is_its_own_whatever_shapes_are_exact() -> None:
    layer = PrepackedLinear(make_layer(256, 352))
    rows = torch.randn(300, 256).bfloat16()
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
    assert not can_prepack(make_layer(48, 80)), "inputs are multiplied by 32"
    assert not can_prepack(make_layer(64, 48)), "there is no whole block"
    assert not can_prepack(make_layer(64, 72)), "outputs are no whole vectors"
    assert not can_prepack(make_layer(64, 80).float())
    layer = make_layer(64, 80, has_bias=True)
    layer.bias = torch.nn.Parameter(layer.bias.float(), requires_grad=False)
    assert not can_prepack(layer)
