"""Choices by the race of :mod:`hdserve.noise` among all tokens, for many rows at once."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.noise import FIRST_FACTOR, SECOND_FACTOR, SPACING

_COLUMNS: Final = 1024
"""The columns that one program of the first kernel reads."""


def draw_tokens(
    logits: torch.Tensor, keys: torch.Tensor, inverse_temperature: float
) -> torch.Tensor:
    """The token that arrives first in each row.

    Args:
        logits: ``[num_rows, vocab_size]``; NaN is never drawn.
        keys: ``[num_rows]`` int64, see :func:`hdserve.noise.position_key`.
        inverse_temperature: a number of float32.

    Returns:
        ``[num_rows]`` int64; :data:`~hdserve.engine.kernels.draw.NO_TOKEN` if there is none.
    """
    num_rows, num_columns = logits.shape
    num_blocks = triton.cdiv(num_columns, _COLUMNS)
    scores = logits.new_empty((num_rows, num_blocks), dtype=torch.float64)
    columns = logits.new_empty((num_rows, num_blocks), dtype=torch.int32)
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    _race_in_blocks[(num_rows, num_blocks)](
        *(logits, logits.stride(0), num_columns, keys, inverse_temperature),
        *(scores, columns, num_blocks),
        SPACING=SPACING,
        FIRST=FIRST_FACTOR,
        SECOND=SECOND_FACTOR,
        COLUMNS=_COLUMNS,
    )
    _find_winners[(num_rows,)](
        *(scores, columns, num_blocks, tokens),
        NO_TOKEN=NO_TOKEN,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return tokens


@triton.jit
def _scrambled(word, FIRST: tl.constexpr, SECOND: tl.constexpr):
    word ^= word >> 16
    word *= FIRST
    word ^= word >> 13
    word *= SECOND
    return word ^ (word >> 16)


@triton.jit
def _race_in_blocks(
    logits,
    logits_stride,
    num_columns,
    keys,
    inverse_temperature,
    scores,
    columns,
    num_blocks,
    SPACING: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The logarithms of the arrival times; taking logarithms keeps their order."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    at = logits + row * logits_stride + column
    logit = tl.load(at, mask=column < num_columns, other=-float("inf")).to(tl.float64)
    key = tl.load(keys + row)
    word = _scrambled(column.to(tl.uint32) * SPACING + key.to(tl.uint32), FIRST, SECOND)
    word = _scrambled(word ^ (key >> 32).to(tl.uint32), FIRST, SECOND)
    longest = -libdevice.log1p(-(word.to(tl.float64) + 0.5) * 2.0**-32)
    score = logit * inverse_temperature - libdevice.log(longest)
    score = tl.where(score == score, score, -float("inf"))
    best, place = tl.max(score, axis=0, return_indices=True)
    tl.store(scores + row * num_blocks + block, best)
    tl.store(columns + row * num_blocks + block, block * COLUMNS + place)


@triton.jit
def _find_winners(
    scores, columns, num_blocks, tokens, NO_TOKEN: tl.constexpr, BLOCKS: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    at = scores + row * num_blocks + block
    score = tl.load(at, mask=block < num_blocks, other=-float("inf"))
    best, place = tl.max(score, axis=0, return_indices=True)
    column = tl.load(columns + row * num_blocks + place)
    tl.store(tokens + row, tl.where(best > -float("inf"), column, NO_TOKEN).to(tl.int64))
