"""A tree without the nodes that cannot come, and what the others are worth then."""

from __future__ import annotations

from collections.abc import Sequence

from hdserve.drafting.arrays import MAX_PROBABILITY
from hdserve.tree import DraftTree

_LEAST_LEFT = 1e-6


def prune(tree: DraftTree, may_come: Sequence[bool], pruned: DraftTree) -> None:
    """Add to ``pruned``, which is empty, what is likeliest of ``tree`` without the nodes that
    cannot come, up to its capacity.

    What siblings that cannot come were thought to be worth is shared by those that can: a score is
    a probability, and becomes the one under the condition that none of the former comes.  So the
    scores of what is verified, which is all that budget and calibration hear of, are as true with a
    grammar as without, and a text with one teaches nothing wrong to those without.

    Args:
        may_come: one per node of ``tree``; nothing that hangs on a node that cannot come can.
    """
    if all(may_come) and len(tree) <= pruned.capacity + 1:
        pruned.take_nodes(tree)
        return
    scores = _conditional_scores(tree, may_come)
    nodes = (node for node in range(1, len(tree)) if may_come[node])
    best = sorted(nodes, key=scores.__getitem__, reverse=True)[: pruned.capacity]
    places = {node: place for place, node in enumerate((0, *best))}
    pruned.add_nodes(
        [tree.token_ids[node] for node in best],
        [places[tree.parents[node]] for node in best],
        [tree.sources[node] for node in best],
        [scores[node] for node in best],
        [tree.depths[node] for node in best],
    )


def _conditional_scores(tree: DraftTree, may_come: Sequence[bool]) -> list[float]:
    """No node's is above its parent's; of those that cannot come they mean nothing."""
    parents, scores = tree.parents, tree.scores
    left = list(scores)
    for node in range(1, len(scores)):
        if not may_come[node]:
            left[parents[node]] -= scores[node]
    found = [1.0]
    for node in range(1, len(scores)):
        parent, score = parents[node], scores[node]
        conditional = found[parent] * score / max(left[parent], _LEAST_LEFT)
        found.append(min(found[parent], max(score, min(conditional, MAX_PROBABILITY))))
    return found
