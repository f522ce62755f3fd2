"""Trees without the nodes that cannot come, and what the others are worth then."""

from __future__ import annotations

from collections.abc import Sequence

from hdserve.core import Source
from hdserve.drafting.arrays import MAX_PROBABILITY
from hdserve.drafting.budget import MEMORY, PRIOR_WEIGHT
from hdserve.tree import Acceptance, DraftTree

_LEAST_LEFT = 1e-6


class Pruner:
    """Leaves out of trees what cannot come.

    What siblings that cannot come were thought to be worth is shared by those that can: a score is
    a probability, and becomes the one under the condition that none of the former comes.  That is
    still too little, as most of what is among no guesses cannot come either: with a schema 1.2 to
    1.7 times as many were accepted.  So it is learned what these scores turn out to be worth, as
    for all texts with a grammar.

    Budget and calibration hear of the verified nodes alone, with these scores.  They would do wrong
    to hear of those that are left out, which nobody can accept; of the others they learn the same
    from a text with a grammar as from one without, and neither makes the scores of the other wrong.
    """

    def __init__(self) -> None:
        self._expected = self._accepted = PRIOR_WEIGHT

    @property
    def worth(self) -> float:
        """What conditional scores turned out to be worth."""
        return self._accepted / self._expected

    def prune(self, tree: DraftTree, may_come: Sequence[bool], pruned: DraftTree) -> None:
        """Add to ``pruned``, which is empty, what is likeliest of ``tree`` without the nodes that
        cannot come, up to its capacity.

        Args:
            may_come: one per node of ``tree``; nothing that hangs on a node that cannot come can.
        """
        scores = _conditional_scores(tree, may_come, self.worth)
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

    def observe(self, pruned: DraftTree, acceptance: Acceptance) -> None:
        """Learn what the scores of a tree were worth, but for 1, which is no estimate."""
        own = [0.0 if score >= 1.0 else score for score in pruned.scores]
        expected = sum(own) / self.worth
        num_accepted = sum(own[node] > 0.0 for node in acceptance.path)
        self._expected = _faded(self._expected) + expected
        self._accepted = _faded(self._accepted) + num_accepted


def _faded(known: float) -> float:
    return PRIOR_WEIGHT + (known - PRIOR_WEIGHT) * MEMORY


def _conditional_scores(tree: DraftTree, may_come: Sequence[bool], worth: float) -> list[float]:
    """No node's is above its parent's; of those that cannot come they mean nothing."""
    parents, scores = tree.parents, tree.scores
    left = list(scores)
    for node in range(1, len(scores)):
        if not may_come[node]:
            left[parents[node]] -= scores[node]
    conditional, found = [1.0], [1.0]
    for node in range(1, len(scores)):
        parent, score = parents[node], scores[node]
        share = score / max(left[parent], _LEAST_LEFT)
        conditional.append(min(conditional[parent], conditional[parent] * share))
        is_estimate = score < 1.0 and tree.sources[node] is not Source.GRAMMAR
        own = min(conditional[node] * worth, MAX_PROBABILITY) if is_estimate else score
        found.append(min(found[parent], own))
    return found
