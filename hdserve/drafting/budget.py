"""How many drafted tokens a step is worth: expected accepted tokens per second, maximised."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost
from hdserve.drafting.cutting import KEPT, NUM_TREE_FIELDS, find_cut
from hdserve.drafting.draft_backoff import DraftBackoff
from hdserve.drafting.draft_price import DraftPrice
from hdserve.drafting.source_worth import SourceWorth
from hdserve.drafting.step_cost import StepCost
from hdserve.tree import Acceptance, DraftTree

_AFFORDABLE_READING = 0.025
"""The largest share of a forward that finding its likeliest tokens may take."""

_NUM_COMPARED_FORWARDS = 32
_MOST_SHARE = 2.0
"""The most that a forward counts for, relative to the expected time: beyond that something else
kept the machine busy."""

_TOO_SLOW = 0.9
"""If forwards take no more than this share of the measured time, the measurement was too high."""


@dataclass(slots=True)
class _Experience:
    """What was learned from steps of about the same number of sequences, and the assumed cost of
    their forwards."""

    cost: BatchCost
    backoff: DraftBackoff
    price: DraftPrice = field(default_factory=DraftPrice)
    num_forwards: int = 0
    forward_share: float = 0.0
    """The mean time of these forwards, relative to the expected time."""

    def note_forward(self, share: float) -> bool:
        """Learn from another forward, whose time is given relative to the expected one.

        Returns:
            Whether the last forwards, together, took much less than expected.
        """
        self.num_forwards = self.num_forwards % _NUM_COMPARED_FORWARDS + 1
        more = min(share, _MOST_SHARE) - self.forward_share
        self.forward_share += more / self.num_forwards
        return self.num_forwards == _NUM_COMPARED_FORWARDS and self.forward_share <= _TOO_SLOW


@dataclass(slots=True)
class _Step:
    """The step whose trees were cut last.

    Attributes:
        forward_s: the expected time of its forward; unknown with rows of prompts.
    """

    experience: _Experience
    num_sequences: int
    num_drafts: int
    forward_s: float | None


class DraftBudget:
    """Cuts the trees of a batch to the size that pays.

    A node's score is its probability of being accepted, so a step that keeps a set of nodes is
    worth ``number of sequences + sum of their scores`` tokens and costs what a forward costs with
    that many rows, of sequences of their length.  Nodes of all trees compete in one order; the best
    prefix of that order wins, down to no drafts at all.  Rows of prompts in the same forward are
    not part of that price; they make further rows cheaper or more expensive.

    Scores of sources that estimate them badly are corrected by their observed worth: accepted over
    expected tokens per source, over the last few hundred drafts.  What is known of a source that is
    cut off fades, so that it is tried again.

    What a step takes besides its forward is timed with and without drafts: finding drafts and
    learning from them costs time, part of which grows with their number, as does the extra time of
    forwards between other work (:class:`DraftPrice`).  If the chosen drafts of the last steps were
    not worth it, drafting pauses for one step, then two, four and so on, until it pays.  Few and
    many sequences have separate prices and pauses.

    Something else may have kept the machine busy while forwards were timed when the engine started.
    If they take much less than expected, their cost is scaled, and everything is learned anew.

    Attributes:
        num_proposed_tokens, num_kept_tokens: drafted tokens before and after, in total; drafts not
            proposed because of :meth:`least_score` are in neither.
    """

    def __init__(self, cost: BatchCost) -> None:
        self.num_proposed_tokens = 0
        self.num_kept_tokens = 0
        self._cost = cost
        self._experiences: dict[int, _Experience] = {}
        """One for each number of binary digits of the number of sequences."""
        self._last: _Step | None = None
        self._worth = SourceWorth()

    def warm_up(self) -> None:
        """Compile, or load what an earlier run on this machine compiled."""
        tree = DraftTree(0, 1)
        tree.add_node(0, 0, Source.OTHER)
        SourceWorth().observe(tree, Acceptance([0], [0]))
        self._cut([tree], [tree.num_draft_tokens], self._cost.of(1), 0, 0, 0.0, 0.0)

    @property
    def affords_reading(self) -> bool:
        """Whether drafters may read the forwards they learn from.

        As drafts, the likeliest tokens of a tree are worth up to 12 % of the tokens.  Finding and
        learning them takes as long in a short forward as in a long one (docs/adr/0015).
        """
        return self._cost.reading_share <= _AFFORDABLE_READING

    def change_cost(self, cost: BatchCost) -> None:
        """Forwards have another cost from now on."""
        self._cost = cost
        self._experiences.clear()

    def skip_step(self, num_sequences: int) -> bool:
        """Skip a step if nothing has to be done in it, nor learned from it.

        Returns:
            Whether it was skipped; if not, call :meth:`begin_step`.
        """
        self._last = None
        experience = self._experiences.get(num_sequences.bit_length())
        return experience is not None and experience.backoff.skip_step()

    def begin_step(self, num_sequences: int) -> bool:
        """Begin a step; returns whether to look for drafts in it."""
        self._last = None
        return num_sequences > 0 and self._experience_with(num_sequences).backoff.begin_step()

    def wants_times(self, num_sequences: int) -> bool:
        """Whether to call :meth:`trim` in this step even if no tree has drafts, to learn how long
        such a step takes."""
        return num_sequences > 0 and self._experience_with(num_sequences).backoff.is_timed

    def is_probe(self, num_sequences: int) -> bool:
        """Whether drafts are looked for only to see whether they pay again.  A part of the
        sequences is enough for that."""
        return num_sequences > 0 and self._experience_with(num_sequences).backoff.is_probing

    def least_score(
        self, max_drafts: int, num_sequences: int, num_other_rows: int = 0, num_columns: int = 0
    ) -> float:
        """The score below which nodes need not be proposed, as :meth:`trim` would cut them.  Its
        worst outcome is the token rate of a step that looks for drafts and keeps none; at that rate
        such nodes are worth less than the cheapest possible row.

        Args:
            max_drafts: the most drafts of all sequences together.
            num_other_rows, num_columns: as for :meth:`trim`.
        """
        if not (max_drafts and num_sequences):
            return 0.0
        experience = self._experience_with(num_sequences)
        cost = experience.cost.of(num_sequences)
        least_more_s = cost.cheapest_draft_s(max_drafts, num_columns, num_other_rows)
        least_more_s += experience.price.seconds(has_prompts=num_other_rows > 0)
        looking_s = max(0.0, experience.backoff.beside_forward_s()[0] * num_sequences)
        least_worth = num_sequences / (cost.plain_s(num_columns) + looking_s) * least_more_s
        return min(1.0, least_worth / max(self._worth.corrections))

    def took(self, step_s: float, forward_s: float, catching_up_s: float = 0.0) -> None:
        """Learn how long the step whose trees were cut last took, and how long its forward took.

        Args:
            step_s: the whole step, without ``catching_up_s``.
            catching_up_s: the time spent telling drafters of sequences and tokens that they had not
                heard of.

        A forward that takes longer than expected adds to the price of drafts, unless it has rows of
        prompts.
        """
        last = self._last
        if last is None:
            return
        number, expected_s, experience = last.num_sequences, last.forward_s, last.experience
        backoff, price = experience.backoff, experience.price
        num_drafts, beside_s = last.num_drafts / number, (step_s - forward_s) / number
        more_s = None if expected_s is None else (forward_s - expected_s) / number
        if backoff.was_probing and backoff.was_drafting:
            price.fade(1 + backoff.num_steps_since)
        elif backoff.was_drafting:
            price.add(num_drafts, beside_s, more_s)
        if more_s is None:
            own_s, price_s = beside_s, price.beside_forward_s(has_prompts=True)
        else:
            own_s, price_s = beside_s + more_s, price.seconds(has_prompts=False)
        backoff.took(
            max(own_s - num_drafts * price_s, min(0.0, own_s)),
            catching_up_s=catching_up_s / number,
            beside_prompts=more_s is None,
        )
        if expected_s is not None and experience.note_forward(forward_s / expected_s):
            self._begin(number, experience.cost.scaled(experience.forward_share))

    def trim(
        self, trees: Sequence[DraftTree], num_other_rows: int = 0, num_columns: int = 0
    ) -> None:
        """Truncate each of ``trees`` in place.

        Args:
            num_other_rows: rows of the same forward that are not nodes of ``trees``.
            num_columns: cached tokens of all sequences of ``trees``.
        """
        self._last = None
        if not trees:
            return
        number = len(trees)
        experience = self._experience_with(number)
        backoff, cost = experience.backoff, experience.cost.of(number)
        sizes = [len(tree.token_ids) - 1 for tree in trees]
        num_proposed = sum(sizes)
        if not (num_proposed or backoff.was_drafting):
            plain_s = cost.plain_s(num_columns)
            self._last = _Step(experience, number, 0, None if num_other_rows else plain_s)
            return
        looking_s, beside_plain_s = backoff.beside_forward_s()
        looking_s, beside_plain_s = number * looking_s, number * beside_plain_s
        price_s = experience.price.seconds(has_prompts=num_other_rows > 0)
        num_kept, tokens, forward_s, plain_s = self._cut(
            trees, sizes, cost, num_other_rows, num_columns, looking_s, price_s
        )
        as_plain_s = tokens / number * (plain_s + beside_plain_s)
        drafting_s = forward_s + looking_s + price_s * num_kept
        backoff.weigh((as_plain_s - drafting_s) / number, as_plain_s / number)
        self.num_proposed_tokens += num_proposed
        self.num_kept_tokens += num_kept
        self._last = _Step(experience, number, num_kept, None if num_other_rows else forward_s)

    def _cut(
        self,
        trees: Sequence[DraftTree],
        sizes: list[int],
        cost: StepCost,
        num_other_rows: int,
        num_columns: int,
        beside_s: float,
        price_s: float,
    ) -> tuple[int, float, float, float]:
        """Truncate to the best number of nodes.

        Args:
            sizes: the drafted tokens of each tree.
            beside_s: what the step takes besides its forward.
            price_s: what each draft takes in addition to its row.

        Returns:
            The number of nodes, the tokens to expect, the seconds of the forward, and those of one
            without drafts.
        """
        scores, sources = array("d"), array("B")
        for tree in trees:
            scores.fromlist(tree.scores)
            sources.frombytes(bytes(tree.sources))
        number, fields = len(sizes), array("q", NUM_TREE_FIELDS * sizes)
        cost.reach(len(scores) + num_other_rows)
        num_kept, tokens, forward_s, plain_s = find_cut(
            scores.buffer_info()[0],
            sources.buffer_info()[0],
            len(scores),
            fields.buffer_info()[0],
            number,
            self._worth.corrections_at,
            self._worth.sums_at,
            len(self._worth.corrections),
            cost.address,
            cost.num_rows,
            num_other_rows,
            cost.num_more_columns(num_columns),
            beside_s,
            price_s,
        )
        if num_kept < len(scores) - number:
            for tree, size in zip(trees, fields[KEPT * number :], strict=True):
                tree.truncate(size)
        return num_kept, tokens, forward_s, plain_s

    def corrections(self) -> Sequence[float]:
        """The observed worth of scores, by source."""
        return self._worth.corrections

    def _experience_with(self, num_sequences: int) -> _Experience:
        size = num_sequences.bit_length()
        if size not in self._experiences:
            self._begin(num_sequences, self._cost)
        return self._experiences[size]

    def _begin(self, num_sequences: int, cost: BatchCost) -> None:
        """Start to learn from steps of about this many sequences."""
        step_s = cost.of(num_sequences).plain_s() / num_sequences
        experience = _Experience(cost, DraftBackoff(step_s, num_sequences))
        self._experiences[num_sequences.bit_length()] = experience

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful the scores of ``tree`` were."""
        if tree.num_draft_tokens:
            self._worth.observe(tree, acceptance)
