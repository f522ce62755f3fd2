"""How many of the tokens that a source drafts are accepted, compared with what it expects."""

from __future__ import annotations

from array import array

from hdserve.core import Source
from hdserve.drafting.worth_sums import NUM_SUMS, observe_tree
from hdserve.tree import Acceptance, DraftTree


class SourceWorth:
    """The observed worth of scores: accepted over expected tokens of the last few hundred drafts.

    Attributes:
        corrections: by source; what a score is to be multiplied with.
        corrections_at, sums_at: addresses for :mod:`~hdserve.drafting.worth_sums`.
    """

    def __init__(self) -> None:
        self.corrections = array("d", [1.0] * len(Source))
        self._sums = array("d", [0.0] * NUM_SUMS * len(Source))
        self.corrections_at, _ = self.corrections.buffer_info()
        self.sums_at, _ = self._sums.buffer_info()

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful the scores of ``tree`` were."""
        scores, sources = array("d", tree.scores), array("B", bytes(tree.sources))
        path = array("q", acceptance.path)
        observe_tree(
            self.corrections_at,
            self.sums_at,
            len(self.corrections),
            scores.buffer_info()[0],
            sources.buffer_info()[0],
            len(scores),
            path.buffer_info()[0],
            len(path),
        )
