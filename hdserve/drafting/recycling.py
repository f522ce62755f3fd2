"""Keeping what the model thought at every verified node, for the ``RECYCLED`` level."""

from __future__ import annotations

import numpy as np

from hdserve.databases.ngram import HASH_SEED, START, extend_hash, jit
from hdserve.databases.recycled import write_top
from hdserve.drafting.arrays import (
    NUM_ORDERS,
    RECYCLED,
    STATE_OUTPUT_START,
    VERIFIED_PARENT,
    VERIFIED_TOKEN,
)
from hdserve.drafting.handles import databases_of, scratch_of


@jit
def recycle(
    database_handles: int, scratch_handles: int, root: int, num_nodes: int, stamp: int
) -> None:
    """Write the rows of the first ``num_nodes`` of ``scratch.verified``.

    Contexts are of output tokens only, ``START`` before them, as those of other sequences.

    Args:
        root: the position of node 0 in the text of the sequence.
    """
    databases = databases_of(database_handles)
    scratch = scratch_of(scratch_handles)
    first = databases.state[STATE_OUTPUT_START]
    for node in range(num_nodes):
        context_hash, length, ancestor, position = HASH_SEED, 0, node, root
        for which in range(NUM_ORDERS):
            order = databases.orders[RECYCLED, which]
            if order < 0:
                break
            while length < order and position >= first - 1:
                if ancestor > 0:
                    token = scratch.verified[VERIFIED_TOKEN, ancestor]
                    ancestor = scratch.verified[VERIFIED_PARENT, ancestor]
                else:
                    token = np.int64(databases.tokens[position]) if position >= first else START
                    position -= 1
                context_hash = extend_hash(context_hash, token)
                length += 1
            if length < order:
                break
            write_top(
                databases.recycled,
                databases.recycled_size,
                context_hash,
                scratch.top_tokens[node],
                scratch.top_shares[node],
                stamp,
            )
