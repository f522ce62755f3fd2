"""Truncating the trees of a step to the nodes that are worth their rows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hdserve.drafting.cutting import KEPT, NUM_TREE_FIELDS, find_cut
from hdserve.drafting.source_worth import SourceWorth
from hdserve.drafting.step_cost import StepCost
from hdserve.tree import DraftTree


def cut_trees(
    trees: Sequence[DraftTree],
    worth: SourceWorth,
    cost: StepCost,
    num_other_rows: int,
    num_columns: int,
    looking_s: float,
    price_s: float,
) -> tuple[int, int, float, float, float]:
    """Truncate trees in place to the best total number of nodes.

    Args:
        worth: corrects the scores; sources that have nodes, but none that is kept, fade.
        cost: of a forward of these sequences.
        num_other_rows: rows of prompts in the same forward.
        num_columns: cached tokens of all sequences.
        looking_s: what the step takes besides its forward.
        price_s: what each draft takes in addition to its row.

    Returns:
        The number of nodes, roots not counted, before and after; the number of tokens to be
        expected of the step; the seconds of its forward, and of one without drafts.
    """
    scores, sources = array("d"), array("B")
    for tree in trees:
        scores.fromlist(tree.scores)
        sources.frombytes(bytes(tree.sources))
    sizes = [len(tree.token_ids) - 1 for tree in trees]
    number, num_nodes = len(sizes), len(scores)
    fields = array("q", NUM_TREE_FIELDS * sizes)
    cost.reach(num_nodes + num_other_rows)
    num_kept, tokens, seconds, plain_s = find_cut(
        scores.buffer_info()[0],
        sources.buffer_info()[0],
        num_nodes,
        fields.buffer_info()[0],
        number,
        worth.corrections_at,
        worth.sums_at,
        len(worth.corrections),
        cost.address,
        cost.num_rows,
        num_other_rows,
        cost.num_more_columns(num_columns),
        looking_s,
        price_s,
    )
    num_proposed = num_nodes - number
    if num_kept < num_proposed:
        for tree, size in zip(trees, fields[KEPT * number :], strict=True):
            tree.truncate(size)
    return num_proposed, num_kept, tokens, seconds, plain_s
