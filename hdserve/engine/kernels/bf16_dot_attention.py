"""Attention over keys and values in bfloat16 by the dot products of AVX-512 BF16.

Like :mod:`~hdserve.engine.kernels.attention`, with half as many instructions as widening takes.
Weights are rounded to bfloat16 for the products, as PyTorch's attention does.
"""

from __future__ import annotations

from typing import Any

from hdserve.engine.kernels.attention import attender, tile_attender
from hdserve.engine.kernels.attention_call import MANY_QUERIES, Call, Tile, calls_of
from hdserve.engine.kernels.attention_numbers import Numbers
from hdserve.engine.kernels.compiled import apart, entry_point, inlined
from hdserve.engine.kernels.memory import bfloat_matrices_at
from hdserve.engine.kernels.paired_values import add_paired_values
from hdserve.engine.kernels.pairs import (
    NUM_PAIRED,
    fused_pairs,
    load_in_turns,
    load_pairs,
    spread_pair,
    store_halves,
)
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.transposed_scores import score_by_transposed_keys
from hdserve.engine.kernels.vectors import load

_POSITIONS = 2


@inlined
def _keep_weights(call: Call, place: int, stop: int) -> None:
    """Store the weights rounded to bfloat16, in the first half of their memory; what is overwritten
    has been read."""
    for column in range(0, stop, NUM_LANES):
        store_halves(call.words, (place, column // _POSITIONS), load(call.scores, (place, column)))


@inlined
def _load_weight(call: Call, place: int, column: int) -> Any:
    return spread_pair(call.words, (place, column // _POSITIONS))


_FEW = Numbers(
    NUM_PAIRED, load_pairs, fused_pairs, _POSITIONS, _keep_weights, _load_weight, load_in_turns
)
_MANY = _FEW._replace(score_together=score_by_transposed_keys, add_together=add_paired_values)

_attend_few, _attend_many = inlined(tile_attender(_FEW)), apart(tile_attender(_MANY))


@inlined
def _attend_tile(call: Call, tile: Tile) -> None:
    if tile.num_queries < MANY_QUERIES:
        _attend_few(call, tile)
    else:
        _attend_many(call, tile)


_attend = attender(_attend_tile)
_call_at = calls_of(bfloat_matrices_at, bfloat_matrices_at)


@entry_point
def attend_by_bf16_dot(
    stored_at: int,
    listed_at: int,
    queries_at: int,
    attended_at: int,
    num_heads: int,
    scores_at: int,
    scores_size: int,
    scale: float,
    softcap: float,
    window: int,
    sinks_at: int,
    first_item: int,
    stop_item: int,
) -> None:
    """Attend for items as :func:`~hdserve.engine.kernels.attention.attend` does.

    Args:
        queries_at: bfloat16, the key size a multiple of ``NUM_PAIRED``.
    """
    places = stored_at, listed_at, queries_at, attended_at
    scores, terms = (scores_at, scores_size), (scale, softcap, window, sinks_at)
    _attend(_call_at(places, num_heads, scores, terms), first_item, stop_item)
