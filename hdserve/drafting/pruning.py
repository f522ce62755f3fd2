"""Trees without the nodes that a grammar forbids, and the worth of the remaining ones."""

from __future__ import annotations

from collections.abc import Sequence

from hdserve.core import Source
from hdserve.drafting.arrays import MAX_PROBABILITY
from hdserve.drafting.worth_sums import MEMORY, PRIOR_WEIGHT
from hdserve.tree import Acceptance, DraftTree

_LEAST_LEFT = 1e-6


class Pruner:
    """Removes forbidden nodes from trees.

    The probability of forbidden siblings goes to the allowed ones: their scores become conditional
    on none of the former being chosen.  That is still too low, because most tokens without a node
    are forbidden too: with a schema 1.2 to 1.7 times as many nodes were accepted.  So the actual
    worth of these scores is learned, for all texts with a grammar together.

    Budget and calibration see only the verified nodes, with these scores.  Removed nodes would
    mislead them, since they cannot be accepted; from the others they learn the same in texts with
    and without a grammar, so neither kind spoils the scores of the other.
    """

    def __init__(self) -> None:
        self._expected = self._accepted = PRIOR_WEIGHT

    @property
    def worth(self) -> float:
        """The observed worth of conditional scores."""
        return self._accepted / self._expected

    def prune(self, tree: DraftTree, may_come: Sequence[bool], pruned: DraftTree) -> None:
        """Add the likeliest allowed nodes of ``tree`` to ``pruned``, which is empty, up to its
        capacity.

        Args:
            may_come: whether each node of ``tree`` is allowed; never after a forbidden one.
        """
        scores = _conditional_scores(tree, may_come, self.worth)
        nodes = (node for node in range(1, len(tree)) if may_come[node])
        best = sorted(nodes, key=scores.__getitem__, reverse=True)[: pruned.capacity]
        places = {node: place for place, node in enumerate((0, *best))}
        pruned.add_behind(
            [tree.token_ids[node] for node in best],
            [places[tree.parents[node]] for node in best],
            [tree.sources[node] for node in best],
            [scores[node] for node in best],
            [tree.depths[node] for node in best],
        )

    def observe(self, pruned: DraftTree, acceptance: Acceptance) -> None:
        """Learn the worth of a tree's scores, except scores of 1, which are not estimates."""
        own = [0.0 if score >= 1.0 else score for score in pruned.scores]
        expected = sum(own) / self.worth
        num_accepted = sum(own[node] > 0.0 for node in acceptance.path)
        self._expected = _faded(self._expected) + expected
        self._accepted = _faded(self._accepted) + num_accepted


def _faded(known: float) -> float:
    return PRIOR_WEIGHT + (known - PRIOR_WEIGHT) * MEMORY


def _conditional_scores(tree: DraftTree, may_come: Sequence[bool], worth: float) -> list[float]:
    """At most the parent's score for each node; those of forbidden nodes mean nothing."""
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
