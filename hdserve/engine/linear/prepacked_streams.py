"""In how many streams the weights of a model are prepacked (docs/adr/0034)."""

from __future__ import annotations

import torch

from hdserve.engine.hardware.kernel_choice import max_rows_faster
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.prepacked_tiles import (
    MAX_STREAMS,
    NUMBERS_PER_LINE,
    OUTPUTS_PER_BLOCK,
    PAIR,
)
from hdserve.engine.kernels.registers import HAS_AVX2_ALONE
from hdserve.engine.linear.prepacked import multiply_prepacked

_MAX_CACHED_BYTES = 1 << 26
"""The weights of a model that has more bytes of them are read from memory in each step."""

_TRIED_ROWS = 10
"""With two streams a forward of 0.5 B parameters took 0.82 times as long on Zen 4, and 1.08 times
as long on Zen 5 (docs/adr/0034)."""

_TRIED_INPUTS = 1024


def pick_num_streams(num_bytes: int) -> int:
    """Two if ``num_bytes`` of weights are read from memory, and this processor then multiplies some
    rows faster with two, else one; always two with AVX2 alone, whose tiles read one at a time.
    Products are the same to the bit."""
    if HAS_AVX2_ALONE:
        return MAX_STREAMS
    return MAX_STREAMS if num_bytes > _MAX_CACHED_BYTES and _are_two_faster() else 1


@torch.inference_mode()
def _are_two_faster() -> bool:
    """Measure it with weights that no cache can hold."""
    num_blocks = _MAX_CACHED_BYTES // (2 * _TRIED_INPUTS * OUTPUTS_PER_BLOCK)
    num_outputs = num_blocks * OUTPUTS_PER_BLOCK
    weights = torch.ones(num_blocks * _TRIED_INPUTS, NUMBERS_PER_LINE, dtype=torch.bfloat16)
    rows, workers = torch.ones(_TRIED_ROWS, _TRIED_INPUTS, dtype=torch.bfloat16), Workers()

    def multiply(num_streams: int) -> None:
        shape = (num_blocks, num_streams, _TRIED_INPUTS // PAIR, -1)
        multiply_prepacked(rows, weights.view(shape), None, num_outputs, workers)

    two, one = (lambda _count, number=number: multiply(number) for number in (MAX_STREAMS, 1))
    return max_rows_faster((_TRIED_ROWS,), two, one) > 0
