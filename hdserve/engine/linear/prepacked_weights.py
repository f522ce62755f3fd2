"""Weights in the order in which :mod:`~hdserve.engine.kernels.prepacked_linear` and
:mod:`~hdserve.engine.kernels.prepacked_floats` read them."""

from __future__ import annotations

import torch

from hdserve.engine.hardware.huge_pages import empty_in_huge_pages
from hdserve.engine.kernels.prepacked_tiles import MAX_STREAMS, OUTPUTS_PER_BLOCK

_WORD_BYTES = 4


def prepack(weights: torch.Tensor, num_streams: int = 1) -> torch.Tensor:
    """Weights for the kernel.

    Args:
        weights: bfloat16 or float32 ``[num_outputs, num_inputs]``, at least
            :data:`OUTPUTS_PER_BLOCK` outputs, the inputs a multiple of :func:`inputs_per_word`.
        num_streams: 1, or 2 for weights that are read from memory rather than from a cache: each
            stream has the weights of half the outputs of a block, contiguous.

    Returns:
        ``[num_blocks, num_streams, num_words, inputs_per_word * OUTPUTS_PER_BLOCK /
        num_streams]``.  The last block has the last outputs, some of which the block before may
        also have.
    """
    assert num_streams in (1, MAX_STREAMS)
    num_outputs, num_inputs = weights.shape
    num_blocks = -(-num_outputs // OUTPUTS_PER_BLOCK)
    width, size = OUTPUTS_PER_BLOCK // num_streams, inputs_per_word(weights.dtype)
    sizes = (num_blocks, num_streams, num_inputs // size, width * size)
    prepacked = empty_in_huge_pages(sizes, weights.dtype)
    for number, block in enumerate(in_words(prepacked)):
        outputs = weights[_first_output(number, num_outputs) :][:OUTPUTS_PER_BLOCK]
        block.copy_(outputs.reshape(num_streams, width, -1, size).transpose(1, 2))
    return prepacked


def unpack_weights(prepacked: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Prepacked weights back as ``[num_outputs, num_inputs]``."""
    num_inputs = prepacked.shape[2] * inputs_per_word(prepacked.dtype)
    weights = prepacked.new_empty(num_outputs, num_inputs)
    for number, block in enumerate(in_words(prepacked)):
        outputs = weights[_first_output(number, num_outputs) :][:OUTPUTS_PER_BLOCK]
        in_streams = block.transpose(1, 2)
        outputs.view_as(in_streams).copy_(in_streams)
    return weights


def places_of(outputs: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """Where ``outputs`` are in the blocks, counted through all of them."""
    num_twice = -num_outputs % OUTPUTS_PER_BLOCK
    if not num_twice:
        return outputs
    return outputs + num_twice * (outputs >= num_outputs - OUTPUTS_PER_BLOCK)


def _first_output(block: int, num_outputs: int) -> int:
    return min(block * OUTPUTS_PER_BLOCK, num_outputs - OUTPUTS_PER_BLOCK)


def inputs_per_word(dtype: torch.dtype) -> int:
    """How many inputs of an output lie together, in 32 bits."""
    return _WORD_BYTES // dtype.itemsize


def in_words(prepacked: torch.Tensor) -> torch.Tensor:
    """Prepacked weights as ``[num_blocks, num_streams, num_words, OUTPUTS_PER_BLOCK / num_streams,
    inputs_per_word]``."""
    return prepacked.view(*prepacked.shape[:3], -1, inputs_per_word(prepacked.dtype))
