"""From scores of attention to weights, in compiled code."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import (
    added,
    fused,
    larger,
    largest,
    load,
    multiplied,
    power_of_two,
    spread,
    store,
    tanh,
    total,
)

_ZERO, _ONE, _NOTHING = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_LOG2_E = np.float32(np.log2(np.e))


@inlined
def fill(scores: Any, place: int, first: int, stop: int, value: Any) -> None:
    """Set the scores of a query from one column to another."""
    for column in range(first, stop):
        scores[place, column] = value


@inlined
def sink_of(sinks: Any, head: int) -> Any:
    """The score of a head's attention sink; minus infinity if there is none."""
    return sinks[0, head] if sinks.shape[0] else _NOTHING


@inlined
def _top(scores: Any, place: int, begin: int, end: int) -> Any:
    """The largest score; computed in four independent vectors at a time."""
    a = spread(_NOTHING)
    b, c, d = a, a, a
    stop = begin + (end - begin) // (4 * NUM_LANES) * (4 * NUM_LANES)
    for column in range(begin, stop, 4 * NUM_LANES):
        a = larger(load(scores, (place, column)), a)
        b = larger(load(scores, (place, column + NUM_LANES)), b)
        c = larger(load(scores, (place, column + 2 * NUM_LANES)), c)
        d = larger(load(scores, (place, column + 3 * NUM_LANES)), d)
    for column in range(stop, end, NUM_LANES):
        a = larger(load(scores, (place, column)), a)
    return largest(larger(larger(a, b), larger(c, d)))


@inlined
def softmax(
    scores: Any, place: int, low: int, high: int, scale: Any, softcap: Any, sink: Any
) -> Any:
    """Turn scores into weights from ``low`` to ``high``, 0 on either side.  Returns one divided by
    their sum plus the weight of ``sink``: NaN if a score is NaN or infinite."""
    begin, end = low // NUM_LANES * NUM_LANES, -(-high // NUM_LANES) * NUM_LANES
    if softcap > _ZERO:
        for column in range(begin, end, NUM_LANES):
            score = multiplied(load(scores, (place, column)), spread(scale / softcap))
            store(scores, (place, column), multiplied(tanh(score), spread(softcap / scale)))
    fill(scores, place, begin, low, _NOTHING)
    fill(scores, place, high, end, _NOTHING)
    steepness, sink_power = scale * _LOG2_E, sink * _LOG2_E
    peak = max(steepness * _top(scores, place, begin, end), sink_power)
    slope, shift = spread(steepness), spread(-peak)
    weights = spread(_ZERO)
    for column in range(begin, end, NUM_LANES):
        weight = power_of_two(fused(load(scores, (place, column)), slope, shift))
        store(scores, (place, column), weight)
        weights = added(weights, weight)
    fill(scores, place, 0, low, _ZERO)
    fill(scores, place, high, end, _ZERO)
    if sink > _NOTHING:
        return _ONE / (total(weights) + largest(power_of_two(spread(sink_power - peak))))
    return _ONE / total(weights)
