"""How many of the tokens that a source drafts are accepted, compared with what it expects."""

from __future__ import annotations

from array import array
from collections.abc import Collection

from hdserve.core import Source
from hdserve.tree import Acceptance, DraftTree

PRIOR_WEIGHT = 20.0
"""Every source starts as if it had drafted this many tokens exactly as well as its scores said."""

MEMORY = 0.998
"""The share of what is known of a source that remains after each further draft."""


class SourceWorth:
    """The observed worth of scores: accepted over expected tokens of the last few hundred drafts.

    Attributes:
        corrections: by source; what a score is to be multiplied with.
        address: of ``corrections``, float64s that stay where they are.
    """

    def __init__(self) -> None:
        self._expected = [0.0] * len(Source)
        self._accepted = [0.0] * len(Source)
        """Both without ``PRIOR_WEIGHT``."""
        self.corrections = array("d", [1.0] * len(Source))
        self.address, _ = self.corrections.buffer_info()

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful the scores of ``tree`` were."""
        sources = bytes(tree.sources)  # numbers, as members of an enumeration are slow to hash
        drafted = {*sources[1:]}
        expected, accepted = self._expected, self._accepted
        self._forget(drafted)
        for source, score in zip(sources[1:], tree.scores[1:], strict=True):
            expected[source] += score
        for node in acceptance.path[1:]:
            accepted[sources[node]] += 1.0
        self._correct(drafted)

    def fade(self, sources: Collection[int]) -> None:
        """Trust what is known of ``sources`` less."""
        self._forget(sources)
        self._correct(sources)

    def _forget(self, sources: Collection[int]) -> None:
        for source in sources:
            self._expected[source] *= MEMORY
            self._accepted[source] *= MEMORY

    def _correct(self, sources: Collection[int]) -> None:
        for source in sources:
            accepted = PRIOR_WEIGHT + self._accepted[source]
            self.corrections[source] = accepted / (PRIOR_WEIGHT + self._expected[source])
