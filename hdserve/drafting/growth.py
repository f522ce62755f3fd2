"""The draft tree, grown best first: the node most likely to be accepted is added next."""

from __future__ import annotations

import numpy as np

from hdserve.databases.compiled import fast_inlined, jit
from hdserve.databases.ngram import MAX_TOKEN_ID, Ints
from hdserve.drafting.arrays import (
    CANDIDATE_LEVEL,
    CANDIDATE_TOKEN,
    DRAFTED_DEPTH,
    DRAFTED_LEVEL,
    DRAFTED_PARENT,
    DRAFTED_TOKEN,
    MAX_PROBABILITY,
    NODE_CONFIDENCE,
    NODE_DEPTH,
    NODE_LEVEL,
    NODE_PARENT,
    NODE_POINTERS,
    NODE_PREDICTED,
    NODE_TOKEN,
    POINTER_SIZE,
    STATE_CONFIDENCE,
    STATE_MAY_END,
    STATE_NUM_TOKENS,
    STATE_POINTERS,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.candidates import expand
from hdserve.drafting.chances import fill_chances, needed_probability
from hdserve.drafting.handles import databases_of, learned_of, scratch_of
from hdserve.drafting.known_contexts import arrive
from hdserve.drafting.mixing import confidence_after, region_set
from hdserve.drafting.pointers import advance

EXPANSION_BOUND = 0.5
"""A node is expanded if a child with this probability would still enter the tree."""

_LEVEL_SHIFT, _CONFIDENCE_SHIFT, _PARENT_SHIFT = 20, 24, 32
_LEVEL_MASK, _CONFIDENCE_MASK = 0xF, 0xFF


@fast_inlined
def enqueue(
    queue: Ints, scores: Ints, head: int, length: int, limit: int, score: float, entry: int
) -> int:
    """Insert an entry in descending order of score; at most ``limit`` are kept.

    Returns:
        The new length.
    """
    place = head + length
    if length == limit:
        place -= 1
    else:
        length += 1
    while place > head and scores[place - 1] < score:
        scores[place] = scores[place - 1]
        queue[place] = queue[place - 1]
        place -= 1
    scores[place] = score
    queue[place] = entry
    return length


@fast_inlined
def start_root(databases: Databases, scratch: Scratch) -> None:
    """Create node 0 from the last token of the sequence."""
    nodes, state = scratch.nodes, databases.state
    nodes[0, NODE_TOKEN] = databases.tokens[state[STATE_NUM_TOKENS] - 1]
    nodes[0, NODE_PARENT] = -1
    nodes[0, NODE_DEPTH] = 0
    nodes[0, NODE_CONFIDENCE] = state[STATE_CONFIDENCE]
    for index in range(2 * POINTER_SIZE):
        nodes[0, NODE_POINTERS + index] = state[STATE_POINTERS + index]
    scratch.node_scores[0] = 1.0


@fast_inlined
def expand_node(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    levels: int,
    node: int,
    num_certain: int,
    need: float,
) -> int:
    """Fill ``scratch`` with the candidates after a node; returns their number.

    Args:
        num_certain: how many nodes of its path are not guesses.
    """
    nodes = scratch.nodes
    depth = nodes[node, NODE_DEPTH]
    region = region_set(depth - num_certain, nodes[node, NODE_CONFIDENCE])
    place = arrive(databases, scratch, levels, node, nodes[node, NODE_POINTERS:], region, True)
    nodes[node, NODE_PREDICTED] = place.predicted[0]
    nodes[node, NODE_PREDICTED + 1] = place.predicted[1]
    num, _ = expand(databases, learned, scratch, place, needed_probability(databases, need), False)
    fill_chances(databases, learned, scratch, num, depth)
    return num


@fast_inlined
def is_ending(databases: Databases, token: int) -> bool:
    """Whether nothing follows ``token``."""
    found = False
    for ending in databases.ending:
        found |= ending == token
    return found


@fast_inlined
def enqueue_candidates(
    databases: Databases,
    scratch: Scratch,
    num: int,
    node: int,
    head: int,
    length: int,
    limit: int,
    threshold: float,
) -> int:
    """Queue the candidates after ``node`` that are above the threshold; returns the new length.

    Tokens that end the answer are left out: if one is right it is chosen at ``node``, and nothing
    follows it.
    """
    may_end = databases.state[STATE_MAY_END]
    confidence = scratch.nodes[node, NODE_CONFIDENCE]
    score = scratch.node_scores[node]
    for index in range(num):
        child_score = score * scratch.chances[index]
        if child_score <= threshold:
            continue
        if may_end and is_ending(databases, scratch.candidates[index, CANDIDATE_TOKEN]):
            continue
        entry = (
            scratch.candidates[index, CANDIDATE_TOKEN]
            | (scratch.candidates[index, CANDIDATE_LEVEL] << _LEVEL_SHIFT)
            | (confidence_after(confidence, scratch.probabilities[index]) << _CONFIDENCE_SHIFT)
            | (node << _PARENT_SHIFT)
        )
        length = enqueue(
            scratch.queue, scratch.queue_scores, head, length, limit, child_score, entry
        )
        if length == limit:
            threshold = max(threshold, scratch.queue_scores[head + length - 1])
    return length


@fast_inlined
def add_node(databases: Databases, scratch: Scratch, node: int, entry: int, score: float) -> None:
    """Create ``node`` from a queue entry."""
    nodes = scratch.nodes
    parent = entry >> _PARENT_SHIFT
    token = entry & MAX_TOKEN_ID
    nodes[node, NODE_TOKEN] = token
    nodes[node, NODE_PARENT] = parent
    nodes[node, NODE_DEPTH] = nodes[parent, NODE_DEPTH] + 1
    nodes[node, NODE_LEVEL] = (entry >> _LEVEL_SHIFT) & _LEVEL_MASK
    nodes[node, NODE_CONFIDENCE] = (entry >> _CONFIDENCE_SHIFT) & _CONFIDENCE_MASK
    for index in range(2 * POINTER_SIZE):
        nodes[node, NODE_POINTERS + index] = nodes[parent, NODE_POINTERS + index]
    predicted = (nodes[parent, NODE_PREDICTED], nodes[parent, NODE_PREDICTED + 1])
    advance(databases, nodes[node, NODE_POINTERS:], predicted, token)
    scratch.node_scores[node] = score


@fast_inlined
def begin_chain(
    databases: Databases, scratch: Scratch, levels: int, num_certain: int, score: float
) -> None:
    """Create nodes 1 to ``num_certain`` from the tokens in ``scratch.drafted``, as a chain; each
    has the score ``score``."""
    nodes = scratch.nodes
    for node in range(1, num_certain + 1):
        parent = node - 1
        place = arrive(databases, scratch, levels, parent, nodes[parent, NODE_POINTERS:], 0, False)
        nodes[parent, NODE_PREDICTED] = place.predicted[0]
        nodes[parent, NODE_PREDICTED + 1] = place.predicted[1]
        entry = (
            scratch.drafted[DRAFTED_TOKEN, parent]
            | (nodes[parent, NODE_CONFIDENCE] << _CONFIDENCE_SHIFT)
            | (parent << _PARENT_SHIFT)
        )
        add_node(databases, scratch, node, entry, score)


@fast_inlined
def copy_drafted(scratch: Scratch, num_nodes: int, scale: float) -> None:
    """Write the nodes without the root column by column, and correct their scores."""
    drafted, nodes = scratch.drafted, scratch.nodes
    for node in range(1, num_nodes):
        drafted[DRAFTED_TOKEN, node - 1] = nodes[node, NODE_TOKEN]
        drafted[DRAFTED_PARENT, node - 1] = nodes[node, NODE_PARENT]
        drafted[DRAFTED_DEPTH, node - 1] = nodes[node, NODE_DEPTH]
        drafted[DRAFTED_LEVEL, node - 1] = nodes[node, NODE_LEVEL]
        score = scratch.node_scores[node] * np.float32(scale)
        scratch.node_scores[node] = min(score, np.float32(MAX_PROBABILITY))


@fast_inlined
def is_worth_expanding(
    databases: Databases, scratch: Scratch, node: int, max_depth: int, threshold: float
) -> bool:
    """Whether a child of ``node`` may be drafted and could enter the tree."""
    return (
        scratch.nodes[node, NODE_DEPTH] < max_depth
        and scratch.node_scores[node] * EXPANSION_BOUND > threshold
        and (node == 0 or not is_ending(databases, scratch.nodes[node, NODE_TOKEN]))
    )


@jit
def grow_tree(
    database_handles: int,
    learned_handles: int,
    scratch_handles: int,
    levels: int,
    capacity: int,
    max_depth: int,
    min_score: float,
    scale: float,
    num_certain: int,
) -> int:
    """Fill ``scratch.drafted`` and ``scratch.node_scores``; returns the number of all nodes.

    Handles are addresses of the tables of :mod:`hdserve.drafting.handles`.  The first
    ``num_certain`` nodes are a chain of the tokens already in ``scratch.drafted``, which are
    certain to come; all others grow from its end.

    The score of a node is the estimated probability that it is accepted: ``scale`` times the
    chances of the tokens on its path.  Nodes are in descending order of score, so that the first
    ``k`` are the best tree of ``k`` nodes.
    """
    databases = databases_of(database_handles)
    learned = learned_of(learned_handles)
    scratch = scratch_of(scratch_handles)
    start_root(databases, scratch)
    begin_chain(databases, scratch, levels, num_certain, scratch.node_scores[0])
    num_nodes, head, length = 1 + num_certain, 0, 0
    while num_nodes <= capacity:
        limit = capacity + 1 - num_nodes
        length = min(length, limit)
        node = num_nodes - 1
        threshold = np.float32(min_score / scale)
        if length == limit:
            threshold = max(threshold, scratch.queue_scores[head + length - 1])
        if is_worth_expanding(databases, scratch, node, max_depth, threshold):
            need = threshold / scratch.node_scores[node]
            num = expand_node(databases, learned, scratch, levels, node, num_certain, need)
            length = enqueue_candidates(
                databases, scratch, num, node, head, length, limit, threshold
            )
        if length == 0:
            break
        add_node(databases, scratch, num_nodes, scratch.queue[head], scratch.queue_scores[head])
        num_nodes += 1
        head += 1
        length -= 1
    copy_drafted(scratch, num_nodes, scale)
    return num_nodes
