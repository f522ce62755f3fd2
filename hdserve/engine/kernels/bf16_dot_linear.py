"""Products of few rows with a matrix of weights, both in bfloat16, by the dot products of AVX-512
BF16.

Like :mod:`~hdserve.engine.kernels.linear`, with half as many instructions as widening takes;
results are rounded to bfloat16 at once.
"""

from __future__ import annotations

from hdserve.engine.kernels.compiled import entry_point
from hdserve.engine.kernels.linear import Vectors, multiplier
from hdserve.engine.kernels.memory import bfloats_at
from hdserve.engine.kernels.pairs import NUM_PAIRED, fused_pairs, load_pairs, store_rounded

_multiply = multiplier(Vectors(NUM_PAIRED, load_pairs, fused_pairs, store_rounded))


@entry_point
def multiply_by_bf16_dot_at(
    rows_at: int,
    weights_at: int,
    bias_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    first: int,
    stop: int,
) -> None:
    """Compute the outputs ``first`` to ``stop``, both multiples of
    :data:`~hdserve.engine.kernels.linear.OUTPUTS_AT_ONCE`.

    Args:
        rows_at: bfloat16 ``[num_rows, num_inputs]``, the inputs a multiple of ``NUM_PAIRED``.
        weights_at: bfloat16 ``[num_outputs, num_inputs]``.
        bias_at: bfloat16 ``[num_outputs]``, or 0 for none.
        products_at: bfloat16 ``[num_rows, num_outputs]``, to be filled.
    """
    rows = bfloats_at(rows_at, num_rows, num_inputs)
    weights = bfloats_at(weights_at, num_outputs, num_inputs)
    products = bfloats_at(products_at, num_rows, num_outputs)
    if bias_at:
        _multiply(rows, weights, bfloats_at(bias_at, 1, num_outputs), products, first, stop)
    else:
        _multiply(rows, weights, None, products, first, stop)
