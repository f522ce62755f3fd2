"""How attention computes with keys and values: one by one in float32, or in pairs of bfloat16."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from hdserve.engine.kernels.attention_call import Call, Tile
from hdserve.engine.kernels.blocks import fused_block
from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import load, spread


@inlined
def _leave_all(_call: Call, tile: Tile) -> int:
    return tile.origin


class Numbers(NamedTuple):
    """Operations for compiled code.

    Attributes:
        num_lanes: how many numbers of a query or key a vector holds.
        load: loads such a vector.
        with_products: see :func:`~hdserve.engine.kernels.blocks.with_products`.
        num_positions: how many positions have their values added at once.
        keep_weights: prepares a query's weights, up to a column, for ``load_weight``.
        load_weight: the weights of these positions, in all lanes, for a query.
        load_value: ``NUM_LANES`` numbers of the value of each of these positions.
        score_together: computes the scores of the columns of a tile, for all queries at once;
            returns the first column that it leaves.
        add_together: adds the values of these columns likewise.
    """

    num_lanes: int
    load: Any
    with_products: Any
    num_positions: int
    keep_weights: Any
    load_weight: Any
    load_value: Any
    score_together: Any = _leave_all
    add_together: Any = _leave_all


@inlined
def _keep_weights(call: Call, place: int, stop: int) -> None:
    """Do nothing: weights are used as they are."""


@inlined
def _load_weight(call: Call, place: int, column: int) -> Any:
    return spread(call.scores[place, column])


@inlined
def _load_value(values: Any, first: Any, _second: Any) -> Any:
    return load(values, first)


SINGLE: Final = Numbers(NUM_LANES, load, fused_block, 1, _keep_weights, _load_weight, _load_value)
"""Float32, or bfloat16 that is widened when it is loaded."""
