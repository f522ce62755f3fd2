"""Keeping what the model thought at every verified node, for the ``RECYCLED`` level."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import jit, strictly_inlined
from hdserve.databases.ngram import HASH_SEED, START, Ints, extend_hash
from hdserve.databases.recycled import write_top
from hdserve.drafting.arrays import (
    NUM_ORDERS,
    RECYCLED,
    STATE_OUTPUT_START,
    VERIFIED_PARENT,
    VERIFIED_TOKEN,
)
from hdserve.drafting.handles import databases_of, scratch_of

Logits = npt.NDArray[np.float32]


@strictly_inlined
def _share_out(logits: Logits, node: int, shares: Logits) -> None:
    """The softmax of the likeliest tokens after a node."""
    num_top = logits.shape[1]
    total = np.float32(0.0)
    for index in range(num_top):
        shares[index] = math.exp(logits[node, index] - logits[node, 0])
        total += shares[index]
    for index in range(num_top):
        shares[index] /= total


@jit
def recycle(
    database_handles: int,
    scratch_handles: int,
    tokens: Ints,
    logits: Logits,
    root: int,
    num_nodes: int,
    stamp: int,
) -> None:
    """Write the rows of the first ``num_nodes`` of ``scratch.verified``.

    Contexts are of output tokens only, ``START`` before them, as those of other sequences.

    Args:
        tokens, logits: the likeliest after each node, ``[n, k]``, ``k <= NUM_TOP``.
        root: the position of node 0 in the text of the sequence.
    """
    databases = databases_of(database_handles)
    scratch = scratch_of(scratch_handles)
    first = databases.state[STATE_OUTPUT_START]
    top_tokens, shares = scratch.top_tokens, scratch.top_shares
    shares[tokens.shape[1] :] = np.float32(0.0)
    for node in range(num_nodes):
        for index in range(tokens.shape[1]):
            top_tokens[index] = tokens[node, index]
        _share_out(logits, node, shares)
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
                top_tokens,
                shares,
                stamp,
            )
