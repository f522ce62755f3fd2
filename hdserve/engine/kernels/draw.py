"""One token drawn from a row of logits, in a few passes over it.

The weights that are sampled from are ``e ** ((logit - largest) / temperature)``: the likeliest has
1, so nothing overflows.  A filter is a smallest weight, found by counting weights by their leading
bits, which for non-negative numbers are in the order of the numbers, then by the following bits,
three times in all.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hdserve.engine.kernels.compiled import entry_point, inlined
from hdserve.engine.kernels.memory import doubles_at, floats_at, words_at
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.uniforms import negative_uniforms
from hdserve.engine.kernels.vectors import (
    added,
    fused,
    larger,
    largest,
    load,
    multiplied,
    spread,
    store,
    total,
)
from hdserve.engine.kernels.vectors import (
    exponential as power_of_e,
)
from hdserve.noise import exponential, noise_word

NO_TOKEN: Final = -1
"""The choice if no token can be chosen, because the logits are not finite."""

BLOCK = 4 * NUM_LANES
"""Weights are padded to whole blocks with zeros."""

NUM_BINS = 2048
_DIGITS = ((19, 2047), (8, 2047), (0, 255))
_NOTHING = np.float32(-np.inf)
_LOWEST = np.float32(-87.0)
_ZERO = np.float32(0.0)
_LONGEST = 1e30
"""A time after every arrival: the likeliest token, whose weight is 1, takes at most 23."""

_A_LITTLE_MORE = np.float32(1.0001)
"""Compensates for rounding in a bound."""


@inlined
def _fill(logits: Any, weights: Any, inverse_temperature: Any) -> None:
    """Compute the weights of a row; 0 for NaN, and below ``e ** -87``."""
    num_columns, num_padded = logits.shape[1], weights.shape[1]
    for column in range(num_columns, num_padded):
        weights[0, column] = _NOTHING
    for column in range(num_columns // NUM_LANES * NUM_LANES, num_columns):
        weights[0, column] = logits[0, column]
    top = spread(_NOTHING)
    for column in range(0, num_columns // NUM_LANES * NUM_LANES, NUM_LANES):
        found = load(logits, (0, column))
        store(weights, (0, column), found)
        top = larger(found, top)
    for column in range(num_columns // NUM_LANES * NUM_LANES, num_padded, NUM_LANES):
        top = larger(load(weights, (0, column)), top)
    shift, factor = spread(-largest(top)), spread(inverse_temperature)
    lowest = multiplied(power_of_e(spread(_LOWEST)), spread(np.float32(-1.0)))
    for column in range(0, num_padded, NUM_LANES):
        exponent = multiplied(added(load(weights, (0, column)), shift), factor)
        weight = larger(added(power_of_e(exponent), lowest), spread(_ZERO))
        store(weights, (0, column), weight)


@inlined
def _sum_of_block(weights: Any, first: int) -> float:
    low = added(load(weights, (0, first)), load(weights, (0, first + NUM_LANES)))
    third = load(weights, (0, first + 2 * NUM_LANES))
    high = added(third, load(weights, (0, first + 3 * NUM_LANES)))
    return np.float64(total(added(low, high)))


@inlined
def _sum(weights: Any) -> float:
    found = 0.0
    for first in range(0, weights.shape[1], BLOCK):
        found += _sum_of_block(weights, first)
    return found


@inlined
def _gather(weights: Any, least: Any, gathered: Any) -> int:
    """Gather the non-zero weights of at least ``least``; return their number."""
    num_gathered = 0
    for first in range(0, weights.shape[1], BLOCK):
        low = larger(load(weights, (0, first)), load(weights, (0, first + NUM_LANES)))
        third = load(weights, (0, first + 2 * NUM_LANES))
        high = larger(third, load(weights, (0, first + 3 * NUM_LANES)))
        if largest(larger(low, high)) < least:
            continue
        for column in range(first, first + BLOCK):
            if weights[0, column] >= least and weights[0, column] > _ZERO:
                gathered[0, num_gathered] = weights[0, column]
                num_gathered += 1
    return num_gathered


@inlined
def _threshold(
    gathered: Any, words: Any, num_gathered: int, sums: Any, goal: float, is_counting: bool
) -> Any:
    """The smallest of the largest numbers that together reach ``goal``, or of that many."""
    prefix, missing = np.int64(0), goal
    above = np.int64(31)
    for shift, mask in _DIGITS:
        for bin_index in range(mask + 1):
            sums[0, bin_index] = 0.0
        for index in range(num_gathered):
            word = np.int64(words[0, index])
            if word >> above == prefix:
                amount = 1.0 if is_counting else np.float64(gathered[0, index])
                sums[0, (word >> shift) & mask] += amount
        chosen = np.int64(-1)
        for bin_index in range(mask, -1, -1):
            if sums[0, bin_index] > 0.0:
                chosen = np.int64(bin_index)
                if sums[0, bin_index] >= missing:
                    break
                missing -= sums[0, bin_index]
        else:  # by rounding, all of them are needed, so the smallest is looked for
            missing = np.inf
        prefix, above = (prefix << (above - shift)) | chosen, np.int64(shift)
    words[0, 0] = prefix
    return gathered[0, 0]


@inlined
def _drop_below(weights: Any, least: Any) -> None:
    for column in range(weights.shape[1]):
        weights[0, column] = weights[0, column] if weights[0, column] >= least else _ZERO


@inlined
def _lead(weights: Any, first: int, key: int, least: Any) -> Any:
    """Above 0 if a token may arrive before ``least``; its time is more than ``u / weight`` for its
    noise ``u``."""
    return fused(least, load(weights, (0, first)), negative_uniforms(first, key))


@inlined
def _find_first(weights: Any, key: int) -> int:
    """The column that arrives first, see :mod:`hdserve.noise`; none if all weights are 0."""
    least, found = _LONGEST, NO_TOKEN
    for first in range(0, weights.shape[1], BLOCK):
        limit = spread(np.float32(least) * _A_LITTLE_MORE)
        low = _lead(weights, first, key, limit)
        low = larger(low, _lead(weights, first + NUM_LANES, key, limit))
        high = _lead(weights, first + 2 * NUM_LANES, key, limit)
        high = larger(high, _lead(weights, first + 3 * NUM_LANES, key, limit))
        if largest(larger(low, high)) <= _ZERO:
            continue
        for column in range(first, first + BLOCK):
            weight = np.float64(weights[0, column])
            if weight > 0.0:
                time = exponential(noise_word(key, column)) / weight
                if time < least:
                    least, found = time, column
    return found


@entry_point
def draw_token(
    logits_at: int,
    num_columns: int,
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    key: int,
    scratch_at: int,
    sums_at: int,
) -> int:
    """Draw a column of float32 ``[num_columns]``; :data:`NO_TOKEN` if none can be chosen.

    Args:
        inverse_temperature: finite.
        top_k: how many may be chosen; 0 for all.
        key: of the position, see :mod:`hdserve.noise`.
        scratch_at: float32, twice ``num_columns`` rounded up to whole blocks.
        sums_at: float64 ``[NUM_BINS]``.
    """
    num_padded = (num_columns + BLOCK - 1) // BLOCK * BLOCK
    weights = floats_at(scratch_at, 1, num_padded)
    _fill(floats_at(logits_at, 1, num_columns), weights, np.float32(inverse_temperature))
    least = np.float32(min_p)
    gathered_at = scratch_at + 4 * num_padded
    gathered, words = floats_at(gathered_at, 1, num_padded), words_at(gathered_at, 1, num_padded)
    sums = doubles_at(sums_at, 1, NUM_BINS)
    if 0 < top_k < num_columns:
        num_gathered = _gather(weights, _ZERO, gathered)
        if num_gathered > top_k:
            least_of_k = _threshold(gathered, words, num_gathered, sums, float(top_k), True)
            _drop_below(weights, least_of_k)
    if top_p < 1.0:
        whole = _sum(weights)
        too_little = np.float32(0.5 * (1.0 - top_p) * whole / num_columns)
        num_gathered = _gather(weights, too_little, gathered)
        if num_gathered > 0:
            found = _threshold(gathered, words, num_gathered, sums, top_p * whole, False)
            least = max(least, found)
    if least > _ZERO:
        _drop_below(weights, least)
    return _find_first(weights, key)
