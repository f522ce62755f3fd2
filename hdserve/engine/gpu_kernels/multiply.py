"""Products of the few rows of a decoding step, which take as long as reading the weights.

A program reads the weights of ``_OUTPUTS`` outputs once, ``_INPUTS`` columns at a time, for all
rows.  If that makes fewer programs than the GPU has processors, several programs share the columns,
and the last of them to finish adds up their results in column order.  So a row's result depends
only on the row and the layer, bit for bit::

    outputs        program 0      program 1      ...
    columns 0      |  part 0  |   |  part 0  |
    columns 1      |  part 1  |   |  part 1  |          sum = part 0 + part 1 + ...
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

_MAX_ROWS: Final = 64
_OUTPUTS: Final = 64
_INPUTS: Final = 128
_INPUTS_AT_ONCE: Final = 8
"""The inputs that one load reads; the number of inputs must be a multiple of it."""

_MIN_ROWS: Final = 16
"""The fewest rows that are multiplied at a time; fewer are padded."""

_MAX_PARTS: Final = 8

_STAGES: Final = MappingProxyType({1: 5, 2: 4, 3: 3})
"""Blocks of columns that are being loaded at the same time, by the number of programs for each
processor (docs/adr/0031).  For up to 32 rows three programs have room for three blocks each."""

_STAGES_OF_MANY: Final = 4
"""The same if not all programs run at the same time anyway."""


def can_multiply(weights: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel supports the dtypes and sizes of ``weights``, each ``[num_outputs,
    num_inputs]``."""
    return all(
        weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[1] % _INPUTS_AT_ONCE == 0
        for weight in weights
    )


class _Layers(NamedTuple):
    """The kernel's arguments for layers that are multiplied together.

    Attributes:
        arguments: weights, biases and numbers of outputs, three of each.
        num_blocks: of outputs; each layer begins with a new block.
        num_parts: programs that share the columns.
        are_whole: whether the outputs fill whole blocks.
    """

    arguments: tuple[Sequence[Any], Sequence[Any], Sequence[int]]
    num_blocks: int
    num_parts: int
    has_bias: bool
    are_whole: bool


class RowProducts:
    """Multiplies few rows by the kernel; more rows, or unsupported weights, as PyTorch does.

    Must not be used from two streams of a device at a time.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_processors = int(properties.multi_processor_count)
        self._shared_bytes = int(properties.shared_memory_per_block_optin)
        self._num_ended = torch.zeros(self._num_processors, dtype=torch.int32, device=device)
        """How many of the programs that share outputs have finished; zero between two calls."""
        self._known: dict[tuple[int, ...], _Layers | None] = {}
        """By the addresses of their weights, which never move; ``None`` if the kernel does not
        support them."""

    @staticmethod
    def are_fast_on(device: torch.device) -> bool:
        """Whether Triton's tile products are fast on the GPU (from Ampere on)."""
        return torch.cuda.get_device_capability(device) >= (8, 0)

    def __call__(
        self,
        rows: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """``rows [..., num_inputs]`` times each of one to three ``weights [num_outputs,
        num_inputs]``, plus its bias; either all layers have one or none has.

        Returns:
            ``[..., num_outputs]`` each, of the dtype of ``rows``.
        """
        num_inputs = rows.shape[-1]
        num_rows = rows.numel() // num_inputs
        layers = None
        if 0 < num_rows <= _MAX_ROWS and rows.dtype is weights[0].dtype:
            layers = self._layers(weights, biases)
        if layers is None:
            return [F.linear(rows, *each) for each in zip(weights, biases, strict=True)]
        rows = rows.contiguous()
        products = [rows.new_empty((*rows.shape[:-1], len(weight))) for weight in weights]
        num_parts = layers.num_parts
        padded = max(_MIN_ROWS, triton.next_power_of_2(num_rows))
        found = products[0]
        if num_parts > 1:
            size = num_parts, layers.num_blocks * _OUTPUTS, padded
            found = rows.new_empty(size, dtype=torch.float32)
        weight_arguments, bias_arguments, sizes = layers.arguments
        _multiply[(layers.num_blocks, num_parts)](
            *(rows, found, self._num_ended, num_rows, num_inputs),
            *weight_arguments,
            *bias_arguments,
            *_three(products),
            *sizes,
            COUNT=len(weights),
            HAS_BIAS=layers.has_bias,
            ARE_WHOLE=layers.are_whole,
            IS_WHOLE_ROW=num_inputs % _INPUTS == 0,
            ROWS=padded,
            OUTPUTS=_OUTPUTS,
            INPUTS=_INPUTS,
            PARTS=num_parts,
            num_warps=4,
            num_stages=self._num_stages(padded, layers.num_blocks * num_parts),
        )
        return products

    def _layers(
        self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> _Layers | None:
        key = tuple(weight.data_ptr() for weight in weights)
        if key not in self._known:
            given = [bias for bias in biases if bias is not None]
            num_blocks = sum(triton.cdiv(len(weight), _OUTPUTS) for weight in weights)
            self._known[key] = None
            if can_multiply(weights):
                self._known[key] = _Layers(
                    (_three(weights), _three(given or weights), _three([*map(len, weights)])),
                    num_blocks,
                    self._num_parts(num_blocks, weights[0].shape[1]),
                    bool(given),
                    all(len(weight) % _OUTPUTS == 0 for weight in weights),
                )
        return self._known[key]

    def _num_parts(self, num_blocks: int, num_inputs: int) -> int:
        """How many programs share the columns: enough to keep every processor busy."""
        wanted = round(self._num_processors / num_blocks)
        return max(1, min(wanted, _MAX_PARTS, num_inputs // _INPUTS))

    def _num_stages(self, num_rows: int, num_programs: int) -> int:
        """Pipeline stages, no more than a processor has room for."""
        num_bytes = 2 * _INPUTS * (_OUTPUTS + num_rows)
        programs_each = triton.cdiv(num_programs, self._num_processors)
        wanted = _STAGES.get(programs_each, _STAGES_OF_MANY)
        return max(1, min(wanted, self._shared_bytes // num_bytes))


def _three(values: Sequence[Any]) -> list[Any]:
    """``values``, filled up to three with the last one."""
    return [*values, *[values[-1]] * (3 - len(values))]


@triton.jit
def _one_of(own, second, third, is_second, is_third):
    """Of the three, the one for the layer that this program computes."""
    return tl.where(is_third, third, tl.where(is_second, second, own))


@triton.jit
def _sum(
    total,
    found_at,
    part,
    part_size,
    num_ended_at,
    PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Whether this is the last program of its outputs to finish, and the sum of all results."""
    tl.store(found_at + part * part_size, total)
    tl.debug_barrier()  # the result is stored before this program is counted
    is_last = tl.atomic_add(num_ended_at, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for each in range(PARTS):
            total += tl.load(found_at + each * part_size, cache_modifier=".cg")
        tl.store(num_ended_at, 0)
    return is_last, total


@triton.jit
def _read(weights_at, rows_at, is_output, is_row, is_column, IS_WHOLE: tl.constexpr):
    """A block of weights, and the inputs of all rows that they are multiplied with."""
    if IS_WHOLE:
        return tl.load(weights_at), tl.load(rows_at, mask=is_row, other=0.0)
    is_weight, is_number = is_output[:, None] & is_column[None, :], is_row & is_column[:, None]
    return (
        tl.load(weights_at, mask=is_weight, other=0.0),
        tl.load(rows_at, mask=is_number, other=0.0),
    )


@triton.jit
def _multiply(
    rows,
    found,
    num_ended,
    num_rows,
    num_inputs,
    weight,
    second_weight,
    third_weight,
    bias,
    second_bias,
    third_bias,
    products,
    second_products,
    third_products,
    num_outputs,
    num_second,
    num_third,
    COUNT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
    IS_WHOLE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    program, part = tl.program_id(0), tl.program_id(1)
    second_block = tl.cdiv(num_outputs, OUTPUTS)
    third_block = second_block + tl.cdiv(num_second, OUTPUTS)
    is_second = (COUNT > 1) & (program >= second_block)
    is_third = (COUNT > 2) & (program >= third_block)
    weight = _one_of(weight, second_weight, third_weight, is_second, is_third)
    num_own = _one_of(num_outputs, num_second, num_third, is_second, is_third)
    block_of_layer = program - _one_of(0, second_block, third_block, is_second, is_third)
    output = block_of_layer * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_own
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    is_row = row[None, :] < num_rows
    num_blocks = tl.cdiv(num_inputs, INPUTS)
    first = part * num_blocks // PARTS
    stop = (part + 1) * num_blocks // PARTS
    weights_at = weight + output[:, None].to(tl.int64) * num_inputs + column[None, :]
    rows_at = rows + row[None, :] * num_inputs + column[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for block in range(first, stop):
        weights, numbers = _read(
            *(weights_at + block * INPUTS, rows_at + block * INPUTS, is_output, is_row),
            *(block * INPUTS + column < num_inputs, ARE_WHOLE and IS_WHOLE_ROW),
        )
        total = tl.dot(weights, numbers, total)
    is_last = True
    if PARTS > 1:
        place = program * OUTPUTS + tl.arange(0, OUTPUTS)
        found_at = found + place[:, None] * ROWS + row[None, :]
        part_size = tl.num_programs(0) * OUTPUTS * ROWS
        is_last, total = _sum(
            total, found_at, part, part_size, num_ended + program, PARTS, OUTPUTS, ROWS
        )
    if is_last:
        products = _one_of(products, second_products, third_products, is_second, is_third)
        if HAS_BIAS:
            bias = _one_of(bias, second_bias, third_bias, is_second, is_third)
            total += tl.load(bias + output, mask=is_output, other=0.0)[:, None].to(tl.float32)
        products_at = products + row[None, :] * num_own + output[:, None]
        is_product = is_row & is_output[:, None]
        tl.store(products_at, total.to(products.dtype.element_ty), mask=is_product)
