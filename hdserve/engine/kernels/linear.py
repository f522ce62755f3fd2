"""Products of few rows with a matrix of weights, at about the price of reading the weights once.

Libraries are made for many rows or for one.  Between 2 and 32, the size of a draft tree or of a
batch of them, they take up to three times as long as the weights take to be read.

Every number is a sum over the row in an order that does not depend on the other rows, with
operations whose rounding is fixed (:mod:`~hdserve.engine.kernels.vectors`), so a row comes out with
the same bits whatever else is in the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import bfloats_at, floats_at
from hdserve.engine.kernels.vectors import (
    NUM_LANES,
    fused,
    load,
    prefetch,
    spread,
    store_totals,
)

OUTPUTS_AT_ONCE = 4
"""Outputs that are computed together; a matrix has a multiple of it."""

_ROWS_AT_ONCE = 4
_ROWS_PER_PANEL = 32
"""Rows that are multiplied while the processor's cache holds them."""

_ZERO = np.float32(0.0)


def _tile(load: Any, fused: Any, store_totals: Any, num_lanes: int) -> Any:
    @inlined
    def four_rows(
        rows: Any, weights: Any, bias: Any, products: Any, m: int, n: int, ahead: int
    ) -> None:
        """Four rows times four outputs; meanwhile the weights of two outputs ``ahead`` are read."""
        a0 = a1 = a2 = a3 = spread(_ZERO)
        b0 = b1 = b2 = b3 = spread(_ZERO)
        c0 = c1 = c2 = c3 = spread(_ZERO)
        d0 = d1 = d2 = d3 = spread(_ZERO)
        other = ahead ^ 2
        for k in range(0, rows.shape[1], num_lanes):
            w0, w1 = load(weights, (n, k)), load(weights, (n + 1, k))
            w2, w3 = load(weights, (n + 2, k)), load(weights, (n + 3, k))
            prefetch(weights, (ahead, k))
            prefetch(weights, (other, k))
            a, b = load(rows, (m, k)), load(rows, (m + 1, k))
            c, d = load(rows, (m + 2, k)), load(rows, (m + 3, k))
            a0, a1, a2, a3 = fused(a, w0, a0), fused(a, w1, a1), fused(a, w2, a2), fused(a, w3, a3)
            b0, b1, b2, b3 = fused(b, w0, b0), fused(b, w1, b1), fused(b, w2, b2), fused(b, w3, b3)
            c0, c1, c2, c3 = fused(c, w0, c0), fused(c, w1, c1), fused(c, w2, c2), fused(c, w3, c3)
            d0, d1, d2, d3 = fused(d, w0, d0), fused(d, w1, d1), fused(d, w2, d2), fused(d, w3, d3)
        store_totals(products, (m, n), a0, a1, a2, a3, bias)
        store_totals(products, (m + 1, n), b0, b1, b2, b3, bias)
        store_totals(products, (m + 2, n), c0, c1, c2, c3, bias)
        store_totals(products, (m + 3, n), d0, d1, d2, d3, bias)

    return four_rows


def _single(load: Any, fused: Any, store_totals: Any, num_lanes: int) -> Any:
    @inlined
    def one_row(
        rows: Any, weights: Any, bias: Any, products: Any, m: int, n: int, ahead: int
    ) -> None:
        """A row times four outputs; meanwhile the weights of the four ``ahead`` are read."""
        a0 = a1 = a2 = a3 = spread(_ZERO)
        for k in range(0, rows.shape[1], num_lanes):
            a = load(rows, (m, k))
            w0, w1 = load(weights, (n, k)), load(weights, (n + 1, k))
            w2, w3 = load(weights, (n + 2, k)), load(weights, (n + 3, k))
            prefetch(weights, (ahead, k))
            prefetch(weights, (ahead + 1, k))
            prefetch(weights, (ahead + 2, k))
            prefetch(weights, (ahead + 3, k))
            a0, a1, a2, a3 = fused(a, w0, a0), fused(a, w1, a1), fused(a, w2, a2), fused(a, w3, a3)
        store_totals(products, (m, n), a0, a1, a2, a3, bias)

    return one_row


def multiplier(load: Any, fused: Any, store_totals: Any, num_lanes: int) -> Any:
    """The product for compiled code, of these operations on vectors.

    Args:
        load: some numbers of a row, of the weights too.
        fused: their products added to sums.
        store_totals: takes the place, the sums of four outputs, and whatever it adds to them.
        num_lanes: how many numbers one load takes.
    """
    four_rows = _tile(load, fused, store_totals, num_lanes)
    one_row = _single(load, fused, store_totals, num_lanes)

    @inlined
    def multiply(rows: Any, weights: Any, bias: Any, products: Any, first: int, stop: int) -> None:
        num_rows = rows.shape[0]
        for panel in range(0, num_rows, _ROWS_PER_PANEL):
            end = min(panel + _ROWS_PER_PANEL, num_rows)
            whole = panel + (end - panel) // _ROWS_AT_ONCE * _ROWS_AT_ONCE
            for n in range(first, stop, OUTPUTS_AT_ONCE):
                ahead = min(n + OUTPUTS_AT_ONCE, stop - OUTPUTS_AT_ONCE)
                for m in range(panel, whole, _ROWS_AT_ONCE):
                    turn = m // _ROWS_AT_ONCE % 4
                    four_rows(rows, weights, bias, products, m, n, ahead + turn)
                if end - whole > 1 and end >= _ROWS_AT_ONCE:  # some once more, which is faster
                    four_rows(rows, weights, bias, products, end - _ROWS_AT_ONCE, n, ahead)
                else:
                    for m in range(whole, end):
                        one_row(rows, weights, bias, products, m, n, ahead)

    return multiply


@inlined
def _store_totals(products: Any, indices: Any, a: Any, b: Any, c: Any, d: Any, _bias: Any) -> None:
    store_totals(products, indices, a, b, c, d)


_multiply = multiplier(load, fused, _store_totals, NUM_LANES)


@entry_point
def multiply_at(
    rows_at: int,
    weights_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: bool,
    first: int,
    stop: int,
) -> None:
    """The outputs from ``first`` to ``stop``, both multiples of :data:`OUTPUTS_AT_ONCE`.

    Args:
        rows_at: float32 ``[num_rows, num_inputs]``, the inputs a multiple of the lanes.
        weights_at: ``[num_outputs, num_inputs]``, bfloat16 or float32.
        products_at: float32 ``[num_rows, num_outputs]``, to be filled.
    """
    rows = floats_at(rows_at, num_rows, num_inputs)
    products = floats_at(products_at, num_rows, num_outputs)
    if is_bfloat16:
        weights = bfloats_at(weights_at, num_outputs, num_inputs)
        _multiply(rows, weights, None, products, first, stop)
    else:
        floats = floats_at(weights_at, num_outputs, num_inputs)
        _multiply(rows, floats, None, products, first, stop)
