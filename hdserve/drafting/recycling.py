"""Keeping the likeliest tokens after every verified node, for the ``RECYCLED`` level."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import fast_inlined, strictly_inlined
from hdserve.databases.ngram import HASH_SEED, START, Ints, extend_hash
from hdserve.databases.recycled import write_top
from hdserve.drafting.arrays import (
    NUM_ORDERS,
    RECYCLED,
    STATE_OUTPUT_START,
    Databases,
    Scratch,
)

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


@fast_inlined
def recycle(
    databases: Databases,
    scratch: Scratch,
    node_tokens: Ints,
    node_parents: Ints,
    tokens: Ints,
    logits: Logits,
    root: int,
    stamp: int,
) -> None:
    """Write the rows of the nodes of a tree.

    Contexts consist of output tokens only, preceded by ``START``, as those of other sequences.

    Args:
        node_tokens, node_parents: the tree.
        tokens, logits: the likeliest after each node, ``[n, k]``, ``k <= NUM_TOP``.
        root: the position of node 0 in the text of the sequence.
    """
    first = databases.state[STATE_OUTPUT_START]
    top_tokens, shares = scratch.top_tokens, scratch.top_shares
    shares[tokens.shape[1] :] = np.float32(0.0)
    for node in range(len(tokens)):
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
                    token = node_tokens[ancestor]
                    ancestor = node_parents[ancestor]
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
