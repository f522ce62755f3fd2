"""Linear layers on a GPU.  A few rows take as long as reading the weights, and each product adds
some microseconds, so layers with the same input are multiplied together (docs/adr/0031)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from hdserve.engine.batch.python_operator import define_operator, like_products
from hdserve.engine.batch.step_context import current_plan
from hdserve.engine.linear.shared import SharedLinear, is_plain, linear_layers_of, replace_modules


class GpuSkinnyLinear(SharedLinear):
    """A layer that the kernel multiplies in steps whose plan has one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_compiling = torch.compiler.is_dynamo_compiling()
        multiply = torch.ops.hdserve.gpu_skinny_linear if is_compiling else multiply_by_plan
        return cast("torch.Tensor", multiply(input, self.weight, self.bias))


def use_gpu_skinny_linear(module: torch.nn.Module) -> None:
    """Replace the linear layers of ``module``, in place."""
    layers = filter(is_plain, linear_layers_of(module))
    replace_modules(module, {layer: GpuSkinnyLinear(layer) for layer in layers})


def multiply_by_plan(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``rows [..., num_inputs]`` times ``weight [num_outputs, num_inputs]``: what the operator does
    in Python."""
    return multiply_together_by_plan(rows, [weight], [bias])[0]


def multiply_together_by_plan(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """``rows`` times each of ``weights``: what the operator does in Python."""
    plan = current_plan()
    if plan is None or plan.multiply_rows is None:
        return [F.linear(rows, *each) for each in zip(weights, biases, strict=True)]
    return plan.multiply_rows(rows, weights, biases)


def _like_products_together(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], biases: Any
) -> list[torch.Tensor]:
    return [like_products(rows, weight, biases) for weight in weights]


define_operator(
    "gpu_skinny_linear",
    "(Tensor rows, Tensor weight, Tensor? bias) -> Tensor",
    multiply_by_plan,
    like_products,
)
define_operator(
    "gpu_skinny_linears",
    "(Tensor rows, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    multiply_together_by_plan,
    _like_products_together,
)
