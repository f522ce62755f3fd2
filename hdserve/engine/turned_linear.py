"""Linear layers whose weights are turned for the kernel that multiplies them (docs/adr/0034)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from hdserve.engine.kernels.pairs import NUM_PAIRED
from hdserve.engine.kernels.registers import HAS_PAIRS, NUM_LANES
from hdserve.engine.kernels.turned_linear import multiply_turned_at
from hdserve.engine.kernels.turned_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.python_operator import define_operator
from hdserve.engine.row_linear import can_multiply, multiply_pairs
from hdserve.engine.step_context import current_plan
from hdserve.engine.turned_weights import turn, turn_back
from hdserve.engine.workers import Workers


class TurnedLinear(torch.nn.Linear):
    """A layer that multiplies any number of rows by the kernel, with weights stored only in the
    kernel's order.

    Reading ``weight`` makes a copy in PyTorch's order, which is kept; from then on the layer uses
    it outside a step of the engine, with the same results as the layer it replaces.

    Args:
        layer: one that :func:`can_turn`.
        num_streams: the number of streams in which weights are stored.
    """

    def __init__(self, layer: torch.nn.Linear, num_streams: int = 1) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        turned = turn(layer.weight.data, num_streams)
        self.turned = torch.nn.Parameter(turned, requires_grad=False)
        self._rows: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weights ``[out_features, in_features]``.  Some models read them, or their dtype, in
        every forward."""
        if self._rows is None:
            self._rows = turn_back(self.turned.data, self.out_features)
        return self._rows

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            found = torch.ops.hdserve.turned_linear(
                input, self.turned, self.bias, self.out_features
            )
            return cast("torch.Tensor", found)
        plan = current_plan()
        if plan is None and self._rows is not None:
            return F.linear(input, self._rows, self.bias)
        workers = Workers() if plan is None else plan.workers
        return multiply_turned(input, self.turned, self.bias, self.out_features, workers)


def can_turn(layer: torch.nn.Linear) -> bool:
    """Whether the processor multiplies bfloat16 in pairs, and the kernel supports the sizes."""
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
    num_streams = turned.shape[1]
    return multiply_pairs(
        multiply_turned_at, rows, turned, bias, num_outputs, workers, 1, num_streams
    )


def multiply_turned_by_plan(
    rows: torch.Tensor, turned: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """What the operator does in Python; compiled models only run within a step."""
    plan = current_plan()
    assert plan is not None, "a compiled model was called outside of a step"
    return multiply_turned(rows, turned, bias, num_outputs, plan.workers)


def _like_products(
    rows: torch.Tensor, _turned: torch.Tensor, _bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Shape and dtype of the operator's result."""
    return rows.new_empty((*rows.shape[:-1], num_outputs))


define_operator(
    "turned_linear",
    "(Tensor rows, Tensor turned, Tensor? bias, int num_outputs) -> Tensor",
    multiply_turned_by_plan,
    _like_products,
)


def _multiply_several_by_plan(rows: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    """The products by the weights of several layers.

    Args:
        arguments: the weights of all, then their biases, then their numbers of outputs.
    """
    return [multiply_turned_by_plan(rows, *each) for each in _by_layer(arguments)]


def _like_several_products(rows: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    return [_like_products(rows, *each) for each in _by_layer(arguments)]


def _by_layer(arguments: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    number = len(arguments) // 3
    parts = (arguments[first : first + number] for first in range(0, len(arguments), number))
    return zip(*parts, strict=True)


define_operator(
    "two_turned_linears",
    "(Tensor rows, Tensor first, Tensor second, Tensor? first_bias, Tensor? second_bias, "
    "int first_outputs, int second_outputs) -> (Tensor, Tensor)",
    _multiply_several_by_plan,
    _like_several_products,
)
define_operator(
    "three_turned_linears",
    "(Tensor rows, Tensor first, Tensor second, Tensor third, Tensor? first_bias, "
    "Tensor? second_bias, Tensor? third_bias, int first_outputs, int second_outputs, "
    "int third_outputs) -> (Tensor, Tensor, Tensor)",
    _multiply_several_by_plan,
    _like_several_products,
)
