"""Linear layers whose weights are stored a second time, turned for the kernel that multiplies them
(docs/adr/0034)."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F

from hdserve.engine.kernels.pairs import NUM_PAIRED
from hdserve.engine.kernels.registers import HAS_PAIRS, NUM_LANES
from hdserve.engine.kernels.turned_linear import (
    OUTPUTS_PER_BLOCK,
    multiply_turned_at,
    turn,
    turn_back,
)
from hdserve.engine.python_operator import define_operator
from hdserve.engine.row_linear import ALL_ROWS, RowLinear, can_multiply, share_product
from hdserve.engine.step_context import current_plan
from hdserve.engine.workers import Workers


class TurnedLinear(RowLinear):
    """One whose kernel multiplies any number of rows, by weights of its own.

    Args:
        layer: one that :func:`can_turn`.
    """

    turned: torch.Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer, torch.tensor(ALL_ROWS))
        self.register_buffer("turned", turn(layer.weight.data), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            found = torch.ops.hdserve.turned_linear(
                input, self.turned, self.bias, self.out_features
            )
            return cast("torch.Tensor", found)
        plan = current_plan()
        if plan is None or not input.numel():
            return F.linear(input, self.weight, self.bias)
        return multiply_turned(input, self.turned, self.bias, self.out_features, plan.workers)


def can_turn(layer: torch.nn.Linear) -> bool:
    """Whether the processor multiplies bfloat16 in pairs, and the kernel knows the sizes."""
    bias = layer.bias
    return (
        HAS_PAIRS
        and can_multiply(layer)
        and layer.weight.dtype == torch.bfloat16
        and layer.in_features % NUM_PAIRED == 0
        and layer.out_features >= OUTPUTS_PER_BLOCK
        and layer.out_features % NUM_LANES == 0
        and (bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()))
    )


def multiply_turned(
    rows: torch.Tensor,
    turned: torch.Tensor,
    bias: torch.Tensor | None,
    num_outputs: int,
    workers: Workers,
) -> torch.Tensor:
    """``rows [..., num_inputs]`` times turned weights: bfloat16 ``[..., num_outputs]``."""
    rows = rows.contiguous()
    num_inputs = rows.shape[-1]
    num_rows = rows.numel() // num_inputs
    products = rows.new_empty((*rows.shape[:-1], num_outputs))
    arguments = (
        rows.data_ptr(),
        turned.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        products.data_ptr(),
        num_rows,
        num_inputs,
        num_outputs,
    )
    share_product(partial(multiply_turned_at, *arguments), turned, num_rows, workers, step=1)
    return products


def multiply_turned_by_plan(
    rows: torch.Tensor, turned: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """What the operator does in Python."""
    plan = current_plan()
    if plan is None or not rows.numel():
        return F.linear(rows, turn_back(turned, num_outputs), bias)
    return multiply_turned(rows, turned, bias, num_outputs, plan.workers)


def _like_products(
    rows: torch.Tensor, _turned: torch.Tensor, _bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Shape and dtype of what the operator gives."""
    return rows.new_empty((*rows.shape[:-1], num_outputs))


define_operator(
    "turned_linear",
    "(Tensor rows, Tensor turned, Tensor? bias, int num_outputs) -> Tensor",
    multiply_turned_by_plan,
    _like_products,
)
