"""Which nodes of the trees of a step are worth their rows, found in compiled code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdserve.databases.compiled import fast_inlined, jit
from hdserve.drafting.handles import float64_1d, float64_2d, int64_2d, uint8_1d
from hdserve.drafting.worth_sums import fade_sources

SIZE, START, TAKEN, KEPT = range(4)
"""The fields of a tree: its number of drafted nodes, the index of the first of them among the nodes
of all trees, how many of them were looked at so far, and how many are worth their rows."""

NUM_TREE_FIELDS = 4

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@fast_inlined
def forward_s(
    num_drafts: int, table: Floats, num_sequences: int, num_other_rows: int, num_more_columns: int
) -> float:
    """Seconds of a forward of ``num_sequences`` that verifies ``num_drafts`` of them all.

    Args:
        table: the seconds of 0, 1, ... rows in total, and those of each further cached token.
        num_other_rows: rows of prompts in the same forward; they are not part of the price, but
            make drafts cheaper or more expensive.
        num_more_columns: further cached tokens, of all sequences together.
    """
    rows_s, column_s = table[0], table[1]
    beside = num_sequences + num_other_rows
    others_s = rows_s[beside] - rows_s[num_sequences]
    columns_s = num_more_columns * column_s[num_sequences + num_drafts]
    seconds: float = rows_s[beside + num_drafts] - others_s + columns_s
    return seconds


@fast_inlined
def _weigh(scores: Floats, sources: Bytes, corrections: Floats, trees: Ints) -> None:
    end = 0
    for tree in range(trees.shape[1]):
        start = end + 1
        end = start + trees[SIZE, tree]
        trees[START, tree], trees[TAKEN, tree], trees[KEPT, tree] = start, 0, 0
        for node in range(start, end):
            scores[node] *= corrections[sources[node]]
            if node > start:
                scores[node] = min(scores[node], scores[node - 1])


@fast_inlined
def _likeliest(scores: Floats, trees: Ints) -> int:
    """The tree whose next node is the likeliest; of several the first."""
    found, most = 0, -1.0
    for tree in range(trees.shape[1]):
        taken = trees[TAKEN, tree]
        if taken < trees[SIZE, tree] and scores[trees[START, tree] + taken] > most:
            found, most = tree, scores[trees[START, tree] + taken]
    return found


@fast_inlined
def _cut_off(sources: Bytes, trees: Ints) -> int:
    """The sources of which there are nodes, but none is kept, as a bit mask."""
    proposed = kept = 0
    for tree in range(trees.shape[1]):
        start = trees[START, tree]
        for index in range(trees[SIZE, tree]):
            bit = 1 << sources[start + index]
            proposed |= bit
            if index < trees[KEPT, tree]:
                kept |= bit
    return proposed & ~kept


@jit
def find_cut(
    scores_at: int,
    sources_at: int,
    num_nodes: int,
    trees_at: int,
    num_trees: int,
    corrections_at: int,
    sums_at: int,
    num_sources: int,
    table_at: int,
    num_rows: int,
    num_other_rows: int,
    num_more_columns: int,
    looking_s: float,
    price_s: float,
) -> tuple[int, float, float, float]:
    """Find the prefix of each tree that belongs to the best total number of nodes.

    A node counts for its corrected score, and never for more than an earlier node of its tree, so
    that the likeliest nodes of all trees are their first ones.

    Args:
        scores_at: address of the scores of the nodes of all trees, float64; those except the roots
            are overwritten by what they count for.
        sources_at: address of the sources of the same nodes, uint8.
        num_nodes: how many these are.
        trees_at: address of ``int64[NUM_TREE_FIELDS, num_trees]`` with ``SIZE`` filled in; fills in
            the rest.
        corrections_at, sums_at: as for :class:`~hdserve.drafting.source_worth.SourceWorth`; sources
            that have nodes, but none that is kept, fade.
        table_at: address of ``float64[2, num_rows]``, see :func:`forward_s`.
        num_other_rows, num_more_columns: as for :func:`forward_s`.
        looking_s, price_s: as for :func:`~hdserve.drafting.cut.cut_trees`.

    Returns:
        What :func:`~hdserve.drafting.cut.cut_trees` does, but for the number of nodes before.
    """
    scores = float64_1d(scores_at, (num_nodes,))
    sources = uint8_1d(sources_at, (num_nodes,))
    trees = int64_2d(trees_at, (NUM_TREE_FIELDS, num_trees))
    table = float64_2d(table_at, (2, num_rows))
    _weigh(scores, sources, float64_1d(corrections_at, (num_sources,)), trees)
    plain_s = forward_s(0, table, num_trees, num_other_rows, num_more_columns)
    expected, num_kept = float(num_trees), 0
    tokens, kept_s, best_rate = expected, plain_s, expected / (plain_s + looking_s)
    for num_taken in range(1, num_nodes - num_trees + 1):
        tree = _likeliest(scores, trees)
        expected += scores[trees[START, tree] + trees[TAKEN, tree]]
        trees[TAKEN, tree] += 1
        taken_s = forward_s(num_taken, table, num_trees, num_other_rows, num_more_columns)
        step_s = taken_s + looking_s + price_s * num_taken
        if expected > best_rate * step_s:
            num_kept, tokens, kept_s, best_rate = num_taken, expected, taken_s, expected / step_s
            for tree in range(num_trees):
                trees[KEPT, tree] = trees[TAKEN, tree]
    fade_sources(_cut_off(sources, trees), corrections_at, sums_at, num_sources)
    return num_kept, tokens, kept_s, plain_s
