"""The draft tree, grown best first: the node most likely to be accepted is added next."""

from __future__ import annotations

from hdserve.databases.ngram import inlined, jit
from hdserve.drafting.candidates import (
    CANDIDATE_LEVEL,
    CANDIDATE_TOKEN,
    POINTER_SIZE,
    STATE_CONFIDENCE,
    STATE_NUM_TOKENS,
    STATE_POINTERS,
    Databases,
    Learned,
    Scratch,
    confidence_after,
    expand,
    region_set,
)
from hdserve.drafting.pointers import advance, fill_suffix, predictions, refresh

NODE_TOKEN, NODE_PARENT, NODE_DEPTH, NODE_LEVEL, NODE_CONFIDENCE, NODE_POINTERS = range(6)
EXPANSION_BOUND = 0.5


@inlined
def enqueue(
    scratch: Scratch,
    head: int,
    length: int,
    limit: int,
    score: float,
    index: int,
    parent: int,
    confidence: int,
) -> int:
    """Insert a candidate in descending order, at most ``limit`` are kept; the new length."""
    queue, scores = scratch.queue, scratch.queue_scores
    place = head + length
    if length == limit:
        place -= 1
    else:
        length += 1
    while place > head and scores[place - 1] < score:
        scores[place] = scores[place - 1]
        for column in range(4):
            queue[place, column] = queue[place - 1, column]
        place -= 1
    scores[place] = score
    queue[place, 0] = scratch.candidates[index, CANDIDATE_TOKEN]
    queue[place, 1] = parent
    queue[place, 2] = scratch.candidates[index, CANDIDATE_LEVEL]
    queue[place, 3] = confidence
    return length


@jit
def grow_tree(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    levels: int,
    capacity: int,
    max_depth: int,
    min_score: float,
) -> int:
    """Fill ``scratch.nodes`` and ``scratch.node_scores``; returns the number of nodes with root.

    The score of a node is the estimated probability that it is accepted.  Nodes come in descending
    score, so that the first ``k`` are the best tree of ``k`` nodes.
    """
    nodes, scores = scratch.nodes, scratch.node_scores
    nodes[0, NODE_TOKEN] = databases.tokens[databases.state[STATE_NUM_TOKENS] - 1]
    nodes[0, NODE_PARENT] = -1
    nodes[0, NODE_DEPTH] = 0
    nodes[0, NODE_CONFIDENCE] = databases.state[STATE_CONFIDENCE]
    for index in range(2 * POINTER_SIZE):
        nodes[0, NODE_POINTERS + index] = databases.state[STATE_POINTERS + index]
    scores[0] = 1.0
    num_nodes, head, length = 1, 0, 0
    while num_nodes <= capacity:
        limit = capacity + 1 - num_nodes
        length = min(length, limit)
        node = num_nodes - 1
        threshold = min_score
        if length == limit:
            threshold = max(threshold, scratch.queue_scores[head + length - 1])
        score = scores[node]
        if nodes[node, NODE_DEPTH] < max_depth and score * EXPANSION_BOUND > threshold:
            depth, confidence = nodes[node, NODE_DEPTH], nodes[node, NODE_CONFIDENCE]
            pointers = nodes[node, NODE_POINTERS:]
            num_suffix, num_shared = fill_suffix(databases, scratch, node)
            refresh(databases, scratch, pointers, num_suffix, num_shared)
            predicted = predictions(databases, scratch, pointers, depth, num_suffix)
            num = expand(
                databases,
                learned,
                scratch,
                levels,
                num_suffix,
                num_shared,
                pointers,
                predicted,
                region_set(depth, confidence),
                threshold / score,
            )
            for index in range(num):
                child_score = score * scratch.probabilities[index]
                if child_score > threshold:
                    after = confidence_after(confidence, scratch.probabilities[index])
                    length = enqueue(scratch, head, length, limit, child_score, index, node, after)
                    if length == limit:
                        threshold = max(threshold, scratch.queue_scores[head + length - 1])
        if length == 0:
            break
        parent = scratch.queue[head, 1]
        token = scratch.queue[head, 0]
        nodes[num_nodes, NODE_TOKEN] = token
        nodes[num_nodes, NODE_PARENT] = parent
        nodes[num_nodes, NODE_DEPTH] = nodes[parent, NODE_DEPTH] + 1
        nodes[num_nodes, NODE_LEVEL] = scratch.queue[head, 2]
        nodes[num_nodes, NODE_CONFIDENCE] = scratch.queue[head, 3]
        for index in range(2 * POINTER_SIZE):
            nodes[num_nodes, NODE_POINTERS + index] = nodes[parent, NODE_POINTERS + index]
        num_suffix, _ = fill_suffix(databases, scratch, parent)
        predicted = predictions(
            databases,
            scratch,
            nodes[parent, NODE_POINTERS:],
            nodes[parent, NODE_DEPTH],
            num_suffix,
        )
        advance(nodes[num_nodes, NODE_POINTERS:], predicted, token)
        scores[num_nodes] = scratch.queue_scores[head]
        num_nodes += 1
        head += 1
        length -= 1
    return num_nodes
