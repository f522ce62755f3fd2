"""How many drafted tokens a step is worth: expected accepted tokens per second, maximised."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hdserve.core import Source
from hdserve.tree import Acceptance, DraftTree

FloatArray = npt.NDArray[np.float64]

_PRIOR_WEIGHT = 20.0
_MEMORY = 0.998
_MAX_PAUSE = 64
_NUM_WEIGHED_STEPS = 16
_AFFORDABLE_READING = 0.06


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


class BatchCost:
    """The time of one forward over its rows and the number of sequences they belong to.

    Attention runs per sequence, so the same rows cost more when they belong to more sequences.

    Args:
        by_num_sequences: at least one measured number of sequences; between two of them the cost
            is interpolated, beyond them it is that of the nearest.
        reading_share: what it takes to find the likeliest tokens of a forward's rows, relative to
            the forward.
    """

    def __init__(
        self, by_num_sequences: Mapping[int, ForwardCost], reading_share: float = 0.0
    ) -> None:
        self._by_num_sequences = dict(sorted(by_num_sequences.items()))
        self.reading_share = reading_share

    def __call__(self, num_rows: npt.ArrayLike, num_sequences: int) -> FloatArray:
        """Seconds for ``num_rows`` of ``num_sequences``."""
        numbers = [*self._by_num_sequences]
        above = min(bisect_left(numbers, num_sequences), len(numbers) - 1)
        below = above if num_sequences >= numbers[above] else max(0, above - 1)
        low, high = numbers[below], numbers[above]
        share = (num_sequences - low) / (high - low) if high > low else 0.0
        costs = [self._by_num_sequences[number](num_rows) for number in (low, high)]
        seconds: FloatArray = (1.0 - share) * costs[0] + share * costs[1]
        return seconds


class _Patience:
    """How long to go on looking for drafts that do not pay.

    Args:
        step_s: a step of plain decoding; so much may be lost before the first pause.
    """

    def __init__(self, step_s: float) -> None:
        self._gain_s = step_s
        self._pause = 0
        self._num_steps_to_skip = 0
        self._is_looking = True

    def is_looking(self) -> bool:
        """Whether to look in this step; to be asked once per step."""
        self._is_looking = self._num_steps_to_skip <= 0
        self._num_steps_to_skip -= 1
        return self._is_looking

    def weigh(self, gain_s: float) -> None:
        """Learn what drafting gained in a step, in seconds, or lost."""
        if not self._is_looking:
            return
        self._gain_s += (gain_s - self._gain_s) / _NUM_WEIGHED_STEPS
        self._pause = 0 if self._gain_s >= 0 else min(_MAX_PAUSE, max(1, 2 * self._pause))
        self._num_steps_to_skip = self._pause


class DraftBudget:
    """Cuts the trees of a batch to the size that pays.

    A node's score is its probability of being accepted, so a step that keeps a set of nodes is
    worth ``number of sequences + sum of their scores`` tokens and costs what the forward costs at
    that many rows.  Nodes of all trees compete in one order; the best prefix of that order wins,
    down to no drafts at all.

    Scores of sources that do not estimate them well are corrected by what they turned out to be
    worth: accepted over expected tokens per source, over the last few hundred drafts.  What is
    known of a source that is cut off fades, so that it is tried again.

    Where the chosen drafts of the last steps were not even worth the time that looking for them
    took, drafting pauses for one step, then two, four and so on, until it pays.  Each number of
    sequences has pauses of its own.

    Attributes:
        num_proposed_tokens, num_kept_tokens: drafted tokens before and after, in total.
    """

    def __init__(self, cost: BatchCost) -> None:
        self.num_proposed_tokens = 0
        self.num_kept_tokens = 0
        self._cost = cost
        self._patience: dict[int, _Patience] = {}
        self._expected = dict.fromkeys(Source, _PRIOR_WEIGHT)
        self._accepted = dict.fromkeys(Source, _PRIOR_WEIGHT)

    @property
    def affords_reading(self) -> bool:
        """Whether drafters may read the forwards they learn from.

        The likeliest tokens of a tree are worth 3 to 12 % of the tokens as drafts; where finding
        them took 0.05 of the forward they paid, where it took 0.07 they did not (docs/adr/0015).
        """
        return self._cost.reading_share <= _AFFORDABLE_READING

    def change_cost(self, cost: BatchCost) -> None:
        """Forwards cost something else from now on."""
        self._cost = cost
        self._patience.clear()

    def wants_drafts(self, num_sequences: int) -> bool:
        """Whether to look for drafts in this step; to be asked once per step."""
        return self._patience_with(num_sequences).is_looking()

    def trim(
        self, trees: Sequence[DraftTree], num_other_rows: int = 0, draft_s: float = 0.0
    ) -> None:
        """Truncate each of ``trees`` in place.

        Args:
            num_other_rows: rows of the same forward that are not nodes of ``trees``.
            draft_s: what it took to fill them, and to learn from the ones before.
        """
        if not trees:
            return
        worths = [self._worths(tree) for tree in trees]
        pooled = np.concatenate(worths)
        order = np.argsort(-pooled, kind="stable")
        tokens = len(trees) + np.concatenate([[0.0], np.cumsum(pooled[order])])
        num_rows = num_other_rows + len(trees) + np.arange(len(tokens))
        seconds = self._cost(num_rows, len(trees))
        num_kept = int(np.argmax(tokens / seconds))
        plain_s = tokens[num_kept] / tokens[0] * seconds[0]
        self._patience_with(len(trees)).weigh(float(plain_s - seconds[num_kept]) - draft_s)
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

    def _patience_with(self, num_sequences: int) -> _Patience:
        found = self._patience.get(num_sequences)
        if found is None:
            found = _Patience(float(self._cost(num_sequences, num_sequences)))
            self._patience[num_sequences] = found
        return found

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
