"""Linear layers that multiply the few rows of draft trees (a skinny matrix) by a kernel made for
them.

``benchmarks/few_rows.py`` compares it with PyTorch's (docs/adr/0017).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F

from hdserve.engine.batch.python_operator import define_operator, like_products
from hdserve.engine.batch.step_context import current_plan
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.linear import OUTPUTS_AT_ONCE, multiply_at
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.linear.shared import SharedLinear, is_plain

_MIN_WEIGHTS_PER_THREAD = 1 << 18
ALL_ROWS = 1 << 40
ROWS_WHILE_READ = 8
"""Rows that are multiplied in the time it takes to read the weights; more rows take longer."""


class SkinnyLinear(SharedLinear):
    """A layer that multiplies few rows by the kernel.

    Outside a step of the engine it is an ordinary linear layer.

    Args:
        max_rows: int64 ``[]``, up to how many rows the kernel is used; all if shapes are exact.  A
            tensor, because it is measured, and compiled code that contained it would seldom be
            found in the cache.
        by_column: the same weights in the order that PyTorch multiplies faster, which then computes
            one row, and more than ``max_rows``; ``None``: PyTorch uses the layer's own weights for
            those, and one row is the kernel's.

    Attributes:
        is_native: whether compiled models call the kernel without Python; then also for one row.
    """

    max_rows: torch.Tensor
    by_column: torch.Tensor | None

    def __init__(
        self,
        layer: torch.nn.Linear,
        max_rows: torch.Tensor,
        by_column: torch.Tensor | None = None,
    ) -> None:
        super().__init__(layer)
        self.is_native = False
        self.register_buffer("max_rows", max_rows, persistent=False)
        self.register_buffer("by_column", by_column, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        others = self.weight if self.by_column is None else self.by_column
        is_compiling = torch.compiler.is_dynamo_compiling()
        takes_any = self.by_column is None or (is_compiling and self.is_native)
        if not takes_any and input.numel() == self.in_features:
            return F.linear(input, others, self.bias)
        multiplied = torch.ops.hdserve.skinny_linear if is_compiling else multiply_rows_by_plan
        found = multiplied(input, self.weight, others, self.bias, self.max_rows)
        return cast("torch.Tensor", found)


def can_multiply(layer: torch.nn.Linear) -> bool:
    """Whether the kernel supports the layer's device, dtype and sizes."""
    return can_load(layer) and len(layer.weight) % OUTPUTS_AT_ONCE == 0


def can_load(layer: torch.nn.Linear) -> bool:
    """Whether kernels can load the inputs of the layer's weights by vectors."""
    return (
        is_plain(layer)
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in (torch.float32, torch.bfloat16)
        and layer.weight.is_contiguous()
        and layer.weight.shape[1] % NUM_LANES == 0
    )


def multiply_rows(
    rows: torch.Tensor, weight: torch.Tensor, workers: Workers, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``rows [..., num_inputs]`` times ``weight [num_outputs, num_inputs]``, by the kernel.

    Returns:
        ``[..., num_outputs]``, of the dtype of ``rows``.
    """
    num_outputs, num_inputs = weight.shape
    num_rows = rows.numel() // num_inputs
    products = torch.empty((*rows.shape[:-1], num_outputs))
    inputs = rows.float().contiguous()
    arguments = (
        inputs.data_ptr(),
        weight.data_ptr(),
        products.data_ptr(),
        num_rows,
        num_inputs,
        num_outputs,
        int(weight.dtype == torch.bfloat16),
    )
    share_product(partial(multiply_at, *arguments), weight, num_rows, workers, OUTPUTS_AT_ONCE)
    if bias is not None:
        products += bias
    return products if products.dtype == rows.dtype else products.to(rows.dtype)


def share_product(
    multiply: Callable[[int, int], None],
    weight: torch.Tensor,
    num_rows: int,
    workers: Workers,
    step: int,
) -> None:
    """Let the workers multiply ``weight``, each a range of its first dimension that begins and ends
    at multiples of ``step``."""
    size = len(weight)
    num_passes = max(1, num_rows // ROWS_WHILE_READ)
    num_parts = workers.num_parts(weight.numel() * num_passes, _MIN_WEIGHTS_PER_THREAD)
    if num_parts == 1:
        multiply(0, size)
        return

    def work(_part: int, first: int, stop: int) -> None:
        multiply(first * step, stop * step)

    workers.share(work, size // step, num_parts)


def multiply_rows_by_plan(
    rows: torch.Tensor,
    weight: torch.Tensor,
    others: torch.Tensor,
    bias: torch.Tensor | None,
    max_rows: torch.Tensor,
) -> torch.Tensor:
    """``weight`` is for the kernel, ``others`` for PyTorch: what the operator does in Python."""
    plan = current_plan()
    num_rows = rows.numel() // rows.shape[-1]
    if plan is None or not num_rows or (num_rows > int(max_rows) and not plan.is_exact):
        return F.linear(rows, others, bias)
    return multiply_rows(rows, weight, plan.workers, bias)


define_operator(
    "skinny_linear",
    "(Tensor rows, Tensor weight, Tensor others, Tensor? bias, Tensor max_rows) -> Tensor",
    multiply_rows_by_plan,
    like_products,
)
