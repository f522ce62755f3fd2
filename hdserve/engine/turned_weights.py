"""Weights in the order in which :mod:`~hdserve.engine.kernels.turned_linear` reads them."""

from __future__ import annotations

from typing import Final

import torch

from hdserve.engine.kernels.turned_linear import OUTPUTS_PER_BLOCK

_PAIR: Final = 2


def turn(weights: torch.Tensor) -> torch.Tensor:
    """Weights for the kernel.

    Args:
        weights: bfloat16 ``[num_outputs, num_inputs]``, the outputs a multiple of ``NUM_LANES`` and
            at least :data:`OUTPUTS_PER_BLOCK`, the inputs an even number.

    Returns:
        ``[num_blocks, num_inputs / 2, 2 * OUTPUTS_PER_BLOCK]``.  The last block has the last
        outputs, some of which the one before it may have, too.
    """
    num_outputs, num_inputs = weights.shape
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    turned = weights.new_empty(num_blocks, num_inputs // _PAIR, OUTPUTS_PER_BLOCK * _PAIR)
    for number, block in enumerate(in_pairs(turned)):
        outputs = weights[_first_output(number, num_outputs) :][:OUTPUTS_PER_BLOCK]
        block.copy_(outputs.reshape(OUTPUTS_PER_BLOCK, -1, _PAIR).transpose(0, 1))
    return turned


def turn_back(turned: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Weights ``[num_outputs, num_inputs]`` that were turned."""
    weights = turned.new_empty(num_outputs, turned.shape[1] * _PAIR)
    for number, block in enumerate(in_pairs(turned)):
        outputs = weights[_first_output(number, num_outputs) :][:OUTPUTS_PER_BLOCK]
        outputs.copy_(block.transpose(0, 1).flatten(1))
    return weights


def _first_output(block: int, num_outputs: int) -> int:
    return min(block * OUTPUTS_PER_BLOCK, num_outputs - OUTPUTS_PER_BLOCK)


def in_pairs(turned: torch.Tensor) -> torch.Tensor:
    """Turned weights as ``[num_blocks, num_inputs / 2, OUTPUTS_PER_BLOCK, 2]``."""
    return turned.view(*turned.shape[:2], OUTPUTS_PER_BLOCK, _PAIR)
