"""Which nodes of the trees of a step are worth their rows, in compiled code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import fast_inlined, jit

SIZE, START, TAKEN, KEPT = range(4)
"""The fields of a tree: its number of drafted nodes, their first index among the nodes of all
trees, how many of them were looked at so far, and how many are worth their rows."""

NUM_TREE_FIELDS = 4

PROPOSED, KEPT_OF_SOURCE = range(2)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@fast_inlined
def _weigh(
    scores: Floats,
    sources: npt.NDArray[np.uint8],
    corrections: Floats,
    trees: Ints,
    by_source: Ints,
) -> None:
    start = 0
    for tree in range(len(trees)):
        trees[tree, START], trees[tree, TAKEN], trees[tree, KEPT] = start, 0, 0
        for node in range(start, start + trees[tree, SIZE]):
            by_source[PROPOSED, sources[node]] += 1
            scores[node] *= corrections[sources[node]]
            if node > start:
                scores[node] = min(scores[node], scores[node - 1])
        start += trees[tree, SIZE]


@fast_inlined
def _likeliest(scores: Floats, trees: Ints) -> int:
    """The tree whose next node is the likeliest; of several the first."""
    found, most = 0, -1.0
    for tree in range(len(trees)):
        taken = trees[tree, TAKEN]
        if taken < trees[tree, SIZE] and scores[trees[tree, START] + taken] > most:
            found, most = tree, scores[trees[tree, START] + taken]
    return found


@jit
def find_cut(
    scores: Floats,
    sources: npt.NDArray[np.uint8],
    corrections: Floats,
    seconds: Floats,
    trees: Ints,
    by_source: Ints,
    tokens: Floats,
) -> int:
    """Find the prefix of each tree that belongs to the best total number of nodes.

    A node counts for its corrected score, and never for more than an earlier node of its tree, so
    that the likeliest nodes of all trees are their first ones.

    Args:
        scores: of the nodes of all trees except the roots; overwritten by what they count for.
        sources: of the same nodes.
        corrections: the observed worth of scores, by source.
        seconds: of a step with 0, 1, ... nodes.
        trees: ``[num_trees, NUM_TREE_FIELDS]`` with ``SIZE`` filled in; fills in the rest.
        by_source: ``[2, num_sources]`` zeros; filled with numbers of proposed and of kept nodes.
        tokens: ``[1]``; filled with the number of tokens to be expected of the step.

    Returns:
        The number of nodes that are kept.
    """
    _weigh(scores, sources, corrections, trees, by_source)
    expected, num_kept = float(len(trees)), 0
    tokens[0], best_rate = expected, expected / seconds[0]
    for num_taken in range(1, len(scores) + 1):
        tree = _likeliest(scores, trees)
        expected += scores[trees[tree, START] + trees[tree, TAKEN]]
        trees[tree, TAKEN] += 1
        if expected > best_rate * seconds[num_taken]:
            tokens[0], num_kept, best_rate = expected, num_taken, expected / seconds[num_taken]
            for tree in range(len(trees)):
                trees[tree, KEPT] = trees[tree, TAKEN]
    for tree in range(len(trees)):
        for node in range(trees[tree, START], trees[tree, START] + trees[tree, KEPT]):
            by_source[KEPT_OF_SOURCE, sources[node]] += 1
    return num_kept
