"""Which kernel each layer gets, as the table of the package says."""

from __future__ import annotations

import pytest
import torch

from hdserve.engine.kernels.prepacked_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.kernels.registers import HAS_AMX
from hdserve.engine.linear.choice import Kernel, kernel_for, kernels_of
from hdserve.engine.linear.prepacked import prepacked_kernel


def make_layer(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> torch.nn.Linear:
    return torch.nn.Linear(num_inputs, num_outputs).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_decide(dtype: torch.dtype) -> None:
    best = Kernel.SKINNY if prepacked_kernel(dtype) is None else Kernel.PREPACKED
    odd = Kernel.OWN if best is Kernel.SKINNY else best
    for num_inputs, num_outputs, wanted in (
        (64, 64, best),
        (64, 100, best),
        (64, 101, odd),
        (64, OUTPUTS_PER_BLOCK - 4, Kernel.SKINNY),
        (64, OUTPUTS_PER_BLOCK - 3, Kernel.OWN),
        (63, 64, Kernel.OWN),
    ):
        layer = make_layer(num_inputs, num_outputs, dtype)
        assert kernel_for(layer, [layer], is_exact=True) is wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_shares_the_weights_decides(dtype: torch.dtype) -> None:
    best = Kernel.SKINNY if prepacked_kernel(dtype) is None else Kernel.PREPACKED
    layer, other = make_layer(64, 64, dtype), make_layer(64, 64, dtype)
    embedding = torch.nn.Embedding(64, 64, dtype=dtype)
    assert kernel_for(layer, [embedding, layer], is_exact=True) is best
    assert kernel_for(layer, [layer, other], is_exact=True) is Kernel.SKINNY
    other.weight = layer.weight
    kernels = kernels_of(torch.nn.Sequential(layer, other), is_exact=True)
    assert kernels == {layer: Kernel.SKINNY, other: Kernel.SKINNY}


def test_what_no_kernel_knows_is_left() -> None:
    for layer in (make_layer(64, 64, torch.float64), make_layer(64, 64, torch.float16)):
        assert kernel_for(layer, [layer], is_exact=True) is Kernel.OWN


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_tiles_multiply_bfloat16_unless_results_must_be_exact() -> None:
    layer = make_layer(64, 64, torch.bfloat16)
    assert kernel_for(layer, [layer], is_exact=False) is Kernel.OWN


def test_a_gpu_has_a_kernel_for_all_layers() -> None:
    layer = torch.nn.Linear(63, 61, device="meta")
    assert kernel_for(layer, [layer], is_exact=False) is Kernel.GPU
