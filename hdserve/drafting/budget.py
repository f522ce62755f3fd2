"""How many drafted tokens a step is worth: expected accepted tokens per second, maximised."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hdserve.core import Source
from hdserve.tree import Acceptance, DraftTree

FloatArray = npt.NDArray[np.float64]

_PRIOR_WEIGHT = 20.0
"""Tokens that a source is taken to have drafted as well as it said."""

_MEMORY = 0.998
"""What is left, after another draft, of what was known of its sources."""

_MAX_PAUSE = 128
"""Steps."""

_AFFORDABLE_LOSS = 0.005
_PATIENCE = 0.1
"""Of a step of plain decoding: what may be lost before the first pause."""

_WORST_GAIN = -0.5
"""Of a step: a larger loss counts as no more."""

_NUM_KEPT_TIMES = 2
"""Of those from before a long pause."""

_NUM_WEIGHED_STEPS = 16
_NUM_TIMED_STEPS = 9
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
        self._tables: dict[int, FloatArray] = {}
        self._plain_s: dict[int, float] = {}
        self.reading_share = reading_share

    def of_rows(self, first: int, number: int, num_sequences: int) -> FloatArray:
        """Seconds for ``first`` rows of ``num_sequences``, for one more, and so on."""
        table = self._tables.get(num_sequences)
        if table is None or len(table) < first + number:
            table = self(np.arange(2 * (first + number)), num_sequences)
            self._tables[num_sequences] = table
        return table[first : first + number]

    def of_plain(self, num_sequences: int) -> float:
        """Seconds for one row each of ``num_sequences``."""
        seconds = self._plain_s.get(num_sequences)
        if seconds is None:
            seconds = self._plain_s[num_sequences] = float(self(num_sequences, num_sequences))
        return seconds

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


class _StepTimes:
    """What the last steps took beside their forwards, with drafts looked for and without."""

    def __init__(self) -> None:
        self.looking_s: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        self.plain_s: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)


class _Patience:
    """How long to go on looking for drafts that do not pay; all times are for each sequence of a
    step.

    What it was while something else kept the machine busy is soon forgotten: a loss counts only up
    to half a step, and after a long pause few of the times before it.

    Pauses double while it does not pay, up to as many steps as make what the look at their end
    loses ``_AFFORDABLE_LOSS`` of their time, ``_MAX_PAUSE`` at most.  To that look belongs what
    drafters catch up with: without it nobody would have told them of the sequences since.

    Args:
        step_s: a step of plain decoding; a part of it may be lost before the first pause.

    Attributes:
        was_looking: what :meth:`is_looking` said last.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._gain_s = step_s * _PATIENCE
        self._worst_gain_s = step_s * _WORST_GAIN
        self._pause = 0
        self._num_steps_to_skip = 0
        self.was_looking = True
        self._catching_up_s: deque[float] = deque(maxlen=_NUM_TIMED_STEPS)
        """In looks at the end of a pause."""
        self._alone, self._beside_prompts = _StepTimes(), _StepTimes()

    def is_looking(self) -> bool:
        """Whether to look in this step; to be asked once per step."""
        self.was_looking = self._num_steps_to_skip <= 0
        self._num_steps_to_skip -= 1
        return self.was_looking

    def took(self, seconds: float, *, catching_up_s: float, beside_prompts: bool) -> None:
        """Learn what the last step took beside its forward and to have drafters catch up."""
        if self.was_looking and self._pause:
            self._catching_up_s.append(catching_up_s)
        times = self._beside_prompts if beside_prompts else self._alone
        if self.was_looking and self._pause >= _NUM_TIMED_STEPS:
            while len(times.looking_s) > _NUM_KEPT_TIMES:
                times.looking_s.popleft()
        (times.looking_s if self.was_looking else times.plain_s).append(seconds)

    @property
    def _times(self) -> _StepTimes:
        """Of one kind, since they count different things."""
        alone, beside_prompts = self._alone, self._beside_prompts
        is_known = alone.looking_s and (alone.plain_s or not beside_prompts.plain_s)
        return alone if is_known or not beside_prompts.looking_s else beside_prompts

    @property
    def looking_s(self) -> float:
        """What a step that looks for drafts takes beside its forward."""
        return _median(self._times.looking_s)

    @property
    def plain_s(self) -> float:
        """What one that does not takes; nothing while there was none, which is plain decoding at
        its best, and never more than the other."""
        return min(_median(self._times.plain_s), self.looking_s)

    def weigh(self, gain_s: float) -> None:
        """Learn what drafting gained in a step, in seconds, or lost."""
        if not self.was_looking or not self._times.looking_s:
            return
        if gain_s < self._worst_gain_s:  # beyond doubt
            self._gain_s = self._worst_gain_s
        else:
            self._gain_s += (gain_s - self._gain_s) / _NUM_WEIGHED_STEPS
        if self._gain_s >= 0:
            self._pause = 0
        elif gain_s > -self._gain_s:  # it may be about to pay again
            self._pause //= 2
        else:
            loss_s = _median(self._catching_up_s) - min(gain_s, self._gain_s)
            loss = loss_s / self._step_s
            longest = min(_MAX_PAUSE, int(loss / _AFFORDABLE_LOSS))
            self._pause = max(1, min(2 * self._pause, longest))
        self._num_steps_to_skip = self._pause


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


class DraftBudget:
    """Cuts the trees of a batch to the size that pays.

    A node's score is its probability of being accepted, so a step that keeps a set of nodes is
    worth ``number of sequences + sum of their scores`` tokens and costs what the forward costs at
    that many rows.  Nodes of all trees compete in one order; the best prefix of that order wins,
    down to no drafts at all.  Rows of prompts in the same forward are no part of that price; they
    make more rows cheaper or dearer.

    Scores of sources that do not estimate them well are corrected by what they turned out to be
    worth: accepted over expected tokens per source, over the last few hundred drafts.  What is
    known of a source that is cut off fades, so that it is tried again.

    What a step takes beside its forward is timed for steps with and without drafts: looking for
    them and learning from them has its price, too.  Where the chosen drafts of the last steps were
    not worth it, drafting pauses for one step, then two, four and so on, until it pays.  Few
    sequences and many have pauses of their own.

    Attributes:
        num_proposed_tokens, num_kept_tokens: drafted tokens before and after, in total.
    """

    def __init__(self, cost: BatchCost) -> None:
        self.num_proposed_tokens = 0
        self.num_kept_tokens = 0
        self._cost = cost
        self._patience: dict[int, _Patience] = {}
        """By the binary digits of the number of sequences."""
        self._last: tuple[_Patience, int, float | None] | None = None
        """Of the step that was cut last, its sequences, and what its forward should take; nobody
        knows with rows of prompts."""
        self._expected = [_PRIOR_WEIGHT] * len(Source)
        self._accepted = [_PRIOR_WEIGHT] * len(Source)

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
        return num_sequences > 0 and self._patience_with(num_sequences).is_looking()

    def took(self, step_s: float, forward_s: float, catching_up_s: float = 0.0) -> None:
        """Learn what the step took whose trees were cut last, and its forward.

        Args:
            step_s: from its beginning to its end, but for what follows.
            catching_up_s: to tell drafters of sequences and tokens that they had not heard of.

        A forward that takes longer than it should counts as part of the price of drafts, but for
        those with rows of prompts.
        """
        if self._last is not None:
            patience, num_sequences, expected_s = self._last
            beside_s = step_s - (forward_s if expected_s is None else expected_s)
            patience.took(
                beside_s / num_sequences,
                catching_up_s=catching_up_s / num_sequences,
                beside_prompts=expected_s is None,
            )

    def trim(self, trees: Sequence[DraftTree], num_other_rows: int = 0) -> None:
        """Truncate each of ``trees`` in place.

        Args:
            num_other_rows: rows of the same forward that are not nodes of ``trees``.
        """
        self._last = None
        if not trees:
            return
        number = len(trees)
        patience = self._patience_with(number)
        num_proposed = sum(tree.num_draft_tokens for tree in trees)
        if not (num_proposed or patience.was_looking):
            self._expect(patience, number, self._cost.of_plain(number), num_other_rows)
            return
        plain_s, looking_s = patience.plain_s * number, patience.looking_s * number
        seconds = self._cost.of_rows(num_other_rows + number, num_proposed + 1, number)
        if num_other_rows:  # which take what they take, with drafts and without
            seconds = seconds - seconds[0] + self._cost.of_plain(number)
        tokens, num_kept = float(number), 0
        if num_proposed:
            tokens, num_kept = self._cut(trees, (seconds + looking_s).tolist())
        as_plain_s = tokens / number * (seconds[0] + plain_s)
        patience.weigh(float(as_plain_s - seconds[num_kept] - looking_s) / number)
        self.num_proposed_tokens += num_proposed
        self.num_kept_tokens += num_kept
        self._expect(patience, number, float(seconds[num_kept]), num_other_rows)

    def _expect(
        self, patience: _Patience, num_sequences: int, forward_s: float, num_other_rows: int
    ) -> None:
        self._last = patience, num_sequences, None if num_other_rows else forward_s

    def _cut(self, trees: Sequence[DraftTree], seconds: Sequence[float]) -> tuple[float, int]:
        """Truncate to the best number of nodes.

        Args:
            seconds: of a step with 0, 1, ... nodes.

        Returns:
            Tokens to be expected, and the number of nodes.
        """
        worths, owners = self._worths(trees)
        order = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)
        tokens = float(len(trees))
        best = tokens, 0
        best_rate = tokens / seconds[0]
        for num_kept, node in enumerate(order, 1):
            tokens += worths[node]
            if tokens > best_rate * seconds[num_kept]:
                best, best_rate = (tokens, num_kept), tokens / seconds[num_kept]
        proposed = _sources(trees)
        sizes = Counter(owners[node] for node in order[: best[1]])
        for index, tree in enumerate(trees):
            tree.truncate(sizes[index])
        self._fade(proposed - _sources(trees))
        return best

    def _worths(self, trees: Sequence[DraftTree]) -> tuple[list[float], list[int]]:
        """Per drafted node of all trees its corrected score, never above that of a node before it,
        so that cutting keeps the nodes a tree named first; and the index of its tree."""
        corrections = [
            accepted / expected
            for accepted, expected in zip(self._accepted, self._expected, strict=True)
        ]
        worths: list[float] = []
        owners: list[int] = []
        for index, tree in enumerate(trees):
            lowest = math.inf
            for source, score in zip(tree.sources[1:], tree.scores[1:], strict=True):
                lowest = min(lowest, score * corrections[source])
                worths.append(lowest)
            owners += [index] * tree.num_draft_tokens
        return worths, owners

    def _patience_with(self, num_sequences: int) -> _Patience:
        size = num_sequences.bit_length()
        if size not in self._patience:
            step_s = self._cost.of_plain(num_sequences) / num_sequences
            self._patience[size] = _Patience(step_s)
        return self._patience[size]

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn what the scores of ``tree`` were worth."""
        if not tree.num_draft_tokens:
            return
        self._fade(_sources([tree]))
        for source, score in zip(tree.sources[1:], tree.scores[1:], strict=True):
            self._expected[source] += score
        for node in acceptance.path[1:]:
            self._accepted[tree.sources[node]] += 1.0

    def _fade(self, sources: Iterable[Source]) -> None:
        for source in sources:
            for sums in (self._expected, self._accepted):
                sums[source] = _PRIOR_WEIGHT + (sums[source] - _PRIOR_WEIGHT) * _MEMORY


def _sources(trees: Iterable[DraftTree]) -> set[Source]:
    return {source for tree in trees for source in tree.sources[1:]}
