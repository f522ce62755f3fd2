"""How many drafted tokens a step is worth: expected accepted tokens per second, maximised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hdserve.core import Source
from hdserve.tree import Acceptance, DraftTree

FloatArray = npt.NDArray[np.float64]

_PRIOR_WEIGHT = 20.0
_MEMORY = 0.998


class ForwardCost:
    """The time of one forward over its number of rows, interpolated between measured points.

    Args:
        seconds_by_rows: at least one point; a point is never cheaper than one with fewer rows.
    """

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        rows = sorted(seconds_by_rows)
        self._rows: FloatArray = np.array(rows, np.float64)
        self._seconds: FloatArray = np.maximum.accumulate([seconds_by_rows[row] for row in rows])
        ends = ([0.0, *self._rows][-2:], [0.0, *self._seconds][-2:])
        self._last_slope = float(np.diff(ends[1])[0] / np.diff(ends[0])[0])

    def __call__(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Seconds for ``num_rows``; beyond the last point the last slope goes on."""
        wanted = np.asarray(num_rows, np.float64)
        beyond = np.maximum(0.0, wanted - self._rows[-1]) * self._last_slope
        seconds: FloatArray = np.interp(wanted, self._rows, self._seconds) + beyond
        return seconds


class DraftBudget:
    """Cuts the trees of a batch to the size that pays.

    A node's score is its probability of being accepted, so a step that keeps a set of nodes is
    worth ``number of sequences + sum of their scores`` tokens and costs what the forward costs at
    that many rows.  Nodes of all trees compete in one order; the best prefix of that order wins,
    down to no drafts at all.

    Scores of sources that do not estimate them well are corrected by what they turned out to be
    worth: accepted over expected tokens per source, over the last few hundred drafts.  What is
    known of a source that is cut off fades, so that it is tried again.

    Attributes:
        num_proposed_tokens, num_kept_tokens: drafted tokens before and after, in total.
    """

    def __init__(self, cost: ForwardCost) -> None:
        self.num_proposed_tokens = 0
        self.num_kept_tokens = 0
        self._cost = cost
        self._expected = dict.fromkeys(Source, _PRIOR_WEIGHT)
        self._accepted = dict.fromkeys(Source, _PRIOR_WEIGHT)

    def trim(self, trees: Sequence[DraftTree], num_other_rows: int = 0) -> None:
        """Truncate each of ``trees`` in place.

        Args:
            num_other_rows: rows of the same forward that are not nodes of ``trees``.
        """
        worths = [self._worths(tree) for tree in trees]
        pooled = np.concatenate(worths) if worths else np.empty(0)
        if not pooled.size:
            return
        order = np.argsort(-pooled, kind="stable")
        tokens = len(trees) + np.concatenate([[0.0], np.cumsum(pooled[order])])
        num_rows = num_other_rows + len(trees) + np.arange(len(tokens))
        num_kept = int(np.argmax(tokens / self._cost(num_rows)))
        is_kept = np.zeros(len(pooled), np.bool_)
        is_kept[order[:num_kept]] = True
        self.num_proposed_tokens += len(pooled)
        self.num_kept_tokens += num_kept
        proposed = _sources(trees)
        first = 0
        for tree, worth in zip(trees, worths, strict=True):
            tree.truncate(int(is_kept[first : first + len(worth)].sum()))
            first += len(worth)
        self._fade(proposed - _sources(trees))

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn what the scores of ``tree`` were worth."""
        self._fade(_sources([tree]))
        for source, score in zip(tree.sources[1:], tree.scores[1:], strict=True):
            self._expected[source] += score
        for node in acceptance.path[1:]:
            self._accepted[tree.sources[node]] += 1.0

    def _fade(self, sources: Iterable[Source]) -> None:
        for source in sources:
            for sums in (self._expected, self._accepted):
                sums[source] = _PRIOR_WEIGHT + (sums[source] - _PRIOR_WEIGHT) * _MEMORY

    def _worths(self, tree: DraftTree) -> FloatArray:
        """Per drafted node its corrected score, never above that of a node before it, so that
        cutting keeps the nodes a tree named first."""
        scores = [
            score * self._accepted[source] / self._expected[source]
            for source, score in zip(tree.sources[1:], tree.scores[1:], strict=True)
        ]
        worths: FloatArray = np.minimum.accumulate(np.array(scores, np.float64))
        return worths


def _sources(trees: Iterable[DraftTree]) -> set[Source]:
    return {source for tree in trees for source in tree.sources[1:]}
