"""How attention computes with keys and values: one by one, in float32, or in pairs of bfloat16."""

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
        num_lanes: numbers of a query or of a key that a vector takes.
        load: such a vector.
        with_products: see :func:`~hdserve.engine.kernels.blocks.with_products`.
        num_positions: so many have their values added at once.
        keep_weights: makes what ``load_weight`` reads of the weights at a place, up to a column.
        load_weight: of these positions, in all lanes, for a query.
        load_value: some numbers of the values of these positions, ``NUM_LANES`` of each.
        score_together: fills in scores of the columns that all queries of a tile see, for all of
            them at once, and gives the first column that it leaves.
        add_together: adds values of these columns likewise.
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
    """Keep nothing: weights are used as they are."""


@inlined
def _load_weight(call: Call, place: int, column: int) -> Any:
    return spread(call.scores[place, column])


@inlined
def _load_value(values: Any, first: Any, _second: Any) -> Any:
    return load(values, first)


SINGLE: Final = Numbers(NUM_LANES, load, fused_block, 1, _keep_weights, _load_weight, _load_value)
"""Float32, or bfloat16 that is widened as it is loaded."""
