"""How many of the tokens that a source drafts are accepted, compared with what it expects."""

from __future__ import annotations

from array import array

from hdserve.core import Source
from hdserve.databases.compiled import fast_inlined, jit
from hdserve.drafting.handles import float64_1d, float64_2d, int64_1d, uint8_1d
from hdserve.drafting.step_cost import FloatArray
from hdserve.tree import Acceptance, DraftTree

PRIOR_WEIGHT = 20.0
"""Every source starts as if it had drafted this many tokens exactly as well as its scores said."""

MEMORY = 0.998
"""The share of what is known of a source that remains after each further draft."""

_EXPECTED, _ACCEPTED = range(2)
"""The sums over the tokens of a source, without ``PRIOR_WEIGHT``."""

_NUM_SUMS = 2


class SourceWorth:
    """The observed worth of scores: accepted over expected tokens of the last few hundred drafts.

    Attributes:
        corrections: by source; what a score is to be multiplied with.
        corrections_at, sums_at: addresses for :func:`fade_sources`.
    """

    def __init__(self) -> None:
        self.corrections = array("d", [1.0] * len(Source))
        self._sums = array("d", [0.0] * _NUM_SUMS * len(Source))
        self.corrections_at, _ = self.corrections.buffer_info()
        self.sums_at, _ = self._sums.buffer_info()

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful the scores of ``tree`` were."""
        scores, sources = array("d", tree.scores), array("B", bytes(tree.sources))
        path = array("q", acceptance.path)
        _observe(
            self.corrections_at,
            self.sums_at,
            len(self.corrections),
            scores.buffer_info()[0],
            sources.buffer_info()[0],
            len(scores),
            path.buffer_info()[0],
            len(path),
        )


@fast_inlined
def fade_sources(faded: int, corrections_at: int, sums_at: int, num_sources: int) -> None:
    """Trust what is known of some sources less.

    Args:
        faded: these sources, as a bit mask.
    """
    sums = float64_2d(sums_at, (_NUM_SUMS, num_sources))
    for source in range(num_sources):
        if faded >> source & 1:
            sums[_EXPECTED, source] *= MEMORY
            sums[_ACCEPTED, source] *= MEMORY
    _correct(float64_1d(corrections_at, (num_sources,)), sums)


@fast_inlined
def _correct(corrections: FloatArray, sums: FloatArray) -> None:
    for source in range(len(corrections)):
        accepted, expected = sums[_ACCEPTED, source], sums[_EXPECTED, source]
        corrections[source] = (PRIOR_WEIGHT + accepted) / (PRIOR_WEIGHT + expected)


@jit
def _observe(
    corrections_at: int,
    sums_at: int,
    num_sources: int,
    scores_at: int,
    sources_at: int,
    num_nodes: int,
    path_at: int,
    num_path_nodes: int,
) -> None:
    """Learn from a tree, whose root does not count.

    Args:
        scores_at, sources_at: addresses of the scores of all nodes, float64, and of their sources,
            uint8.
        path_at: address of the accepted nodes, the root first, int64.
    """
    sums = float64_2d(sums_at, (_NUM_SUMS, num_sources))
    scores = float64_1d(scores_at, (num_nodes,))
    sources = uint8_1d(sources_at, (num_nodes,))
    path = int64_1d(path_at, (num_path_nodes,))
    drafted = 0
    for node in range(1, num_nodes):
        drafted |= 1 << sources[node]
    fade_sources(drafted, corrections_at, sums_at, num_sources)
    for node in range(1, num_nodes):
        sums[_EXPECTED, sources[node]] += scores[node]
    for index in range(1, num_path_nodes):
        sums[_ACCEPTED, sources[path[index]]] += 1.0
    _correct(float64_1d(corrections_at, (num_sources,)), sums)
