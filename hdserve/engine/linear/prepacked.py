"""Linear layers whose weights are prepacked for the kernel that multiplies them (docs/adr/0034)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from hdserve.engine.batch.python_operator import define_operator
from hdserve.engine.batch.step_context import current_plan
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.pairs import NUM_PAIRED
from hdserve.engine.kernels.prepacked_floats import (
    MAX_INPUTS,
    multiply_prepacked_floats_at,
    multiply_prepacked_pairs_at,
)
from hdserve.engine.kernels.prepacked_linear import multiply_prepacked_at
from hdserve.engine.kernels.prepacked_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.kernels.registers import HAS_AVX2_ALONE, HAS_AVX512_BF16
from hdserve.engine.linear.prepacked_weights import prepack, unpack_weights
from hdserve.engine.linear.skinny import can_load, share_product


class PrepackedLinear(torch.nn.Linear):
    """A layer that multiplies any number of rows by the kernel, with weights stored only in the
    kernel's order.

    Reading ``weight`` makes a copy in PyTorch's order, which is kept; from then on the layer uses
    it outside a step of the engine, with the same results as the layer it replaces.

    Args:
        layer: one that :func:`can_prepack`.
        num_streams: the number of streams in which weights are stored.
    """

    def __init__(self, layer: torch.nn.Linear, num_streams: int = 1) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        prepacked = prepack(layer.weight.data, num_streams)
        self.prepacked = torch.nn.Parameter(prepacked, requires_grad=False)
        self._rows: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weights ``[out_features, in_features]``.  Some models read them, or their dtype, in
        every forward."""
        if self._rows is None:
            self._rows = unpack_weights(self.prepacked.data, self.out_features)
        return self._rows

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            found = torch.ops.hdserve.prepacked_linear(
                input, self.prepacked, self.bias, self.out_features
            )
            return cast("torch.Tensor", found)
        plan = current_plan()
        if plan is None and self._rows is not None:
            return F.linear(input, self._rows, self.bias)
        workers = Workers() if plan is None else plan.workers
        return multiply_prepacked(input, self.prepacked, self.bias, self.out_features, workers)


def can_prepack(layer: torch.nn.Linear) -> bool:
    """Whether there is a kernel for the processor, the dtype and the sizes."""
    bias, dtype = layer.bias, layer.weight.dtype
    return (
        prepacked_kernel(dtype) is not None
        and can_load(layer)
        and (dtype == torch.float32 or layer.in_features % NUM_PAIRED == 0)
        and layer.in_features <= MAX_INPUTS
        and layer.out_features >= OUTPUTS_PER_BLOCK
        and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
    )


def prepacked_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    """The kernel for rows and prepacked weights of ``dtype``, if there is one for the processor: on
    those that multiply bfloat16 in pairs for bfloat16, on those with AVX2 alone for float32 too."""
    if HAS_AVX512_BF16:
        return multiply_prepacked_at if dtype == torch.bfloat16 else None
    if not HAS_AVX2_ALONE:
        return None
    by_dtype = {
        torch.float32: multiply_prepacked_floats_at,
        torch.bfloat16: multiply_prepacked_pairs_at,
    }
    return by_dtype.get(dtype)


def multiply_prepacked(
    rows: torch.Tensor,
    prepacked: torch.Tensor,
    bias: torch.Tensor | None,
    num_outputs: int,
    workers: Workers,
) -> torch.Tensor:
    """``rows [..., num_inputs]`` times prepacked weights of the same dtype: ``[...,
    num_outputs]``."""
    kernel, num_streams = prepacked_kernel(rows.dtype), prepacked.shape[1]
    assert kernel is not None, "weights were prepacked for another processor or dtype"
    rows = rows.contiguous()
    num_inputs = rows.shape[-1]
    num_rows = rows.numel() // num_inputs
    products = rows.new_empty((*rows.shape[:-1], num_outputs))
    arguments = (
        rows.data_ptr(),
        prepacked.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        products.data_ptr(),
        num_rows,
        num_inputs,
        num_outputs,
        num_streams,
    )
    share_product(partial(kernel, *arguments), prepacked, num_rows, workers, 1)
    return products


def multiply_prepacked_by_plan(
    rows: torch.Tensor, prepacked: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """What the operator does in Python; compiled models only run within a step."""
    plan = current_plan()
    assert plan is not None, "a compiled model was called outside of a step"
    return multiply_prepacked(rows, prepacked, bias, num_outputs, plan.workers)


def _like_products(
    rows: torch.Tensor, _prepacked: torch.Tensor, _bias: torch.Tensor | None, num_outputs: int
) -> torch.Tensor:
    """Shape and dtype of the operator's result."""
    return rows.new_empty((*rows.shape[:-1], num_outputs))


define_operator(
    "prepacked_linear",
    "(Tensor rows, Tensor prepacked, Tensor? bias, int num_outputs) -> Tensor",
    multiply_prepacked_by_plan,
    _like_products,
)


def _multiply_several_by_plan(rows: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    """The products by the weights of several layers.

    Args:
        arguments: the weights of all, then their biases, then their numbers of outputs.
    """
    return [multiply_prepacked_by_plan(rows, *each) for each in _by_layer(arguments)]


def _like_several_products(rows: torch.Tensor, *arguments: Any) -> list[torch.Tensor]:
    return [_like_products(rows, *each) for each in _by_layer(arguments)]


def _by_layer(arguments: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    number = len(arguments) // 3
    parts = (arguments[first : first + number] for first in range(0, len(arguments), number))
    return zip(*parts, strict=True)


define_operator(
    "two_prepacked_linears",
    "(Tensor rows, Tensor first, Tensor second, Tensor? first_bias, Tensor? second_bias, "
    "int first_outputs, int second_outputs) -> (Tensor, Tensor)",
    _multiply_several_by_plan,
    _like_several_products,
)
define_operator(
    "three_prepacked_linears",
    "(Tensor rows, Tensor first, Tensor second, Tensor third, Tensor? first_bias, "
    "Tensor? second_bias, Tensor? third_bias, int first_outputs, int second_outputs, "
    "int third_outputs) -> (Tensor, Tensor, Tensor)",
    _multiply_several_by_plan,
    _like_several_products,
)
