"""How many drafted tokens a step is worth: expected accepted tokens per second, maximised."""

from __future__ import annotations

from collections.abc import Sequence

from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost
from hdserve.drafting.cut import cut_trees
from hdserve.drafting.experience import Experience
from hdserve.drafting.source_worth import SourceWorth
from hdserve.tree import Acceptance, DraftTree

_AFFORDABLE_READING = 0.025
"""The largest share of a forward that finding its likeliest tokens may take."""


class DraftBudget:
    """Decides in which steps drafts are looked for, and how many of them are verified.

    In each step, in this order::

        skip_step               whether it is in the middle of a pause: then nothing else is asked
        begin_step              the StepBudget of this step
          .is_look              whether to look for drafts; if so:
          .least_score, .trim     what drafters need not propose; what of their trees is verified
        observe                 what was accepted of a tree
          .took                 what the step took, with drafts or without

    What a step takes besides its forward is timed with and without drafts: finding drafts and
    learning from them costs time, part of which grows with their number, as does the extra time of
    forwards between other work (:class:`~hdserve.drafting.draft_price.DraftPrice`).  If the chosen
    drafts of the last steps were not worth it, drafting pauses for one step, then two, four and so
    on, until it pays (:class:`~hdserve.drafting.draft_backoff.DraftBackoff`).  Few and many
    sequences have separate prices and pauses: 1, 2 to 3, 4 to 7 and so on.

    Scores of sources that estimate them badly are corrected by their observed worth: accepted over
    expected tokens per source, over the last few hundred drafts.  What is known of a source that is
    cut off fades, so that it is tried again.

    Attributes:
        num_proposed_tokens, num_kept_tokens: drafted tokens before and after, in total; drafts not
            proposed because of :meth:`StepBudget.least_score` are in neither.
    """

    def __init__(self, cost: BatchCost) -> None:
        self.num_proposed_tokens = 0
        self.num_kept_tokens = 0
        self._cost = cost
        self._experiences: dict[int, Experience] = {}
        """One for each number of binary digits of the number of sequences."""
        self._worth = SourceWorth()

    def warm_up(self) -> None:
        """Compile, or load what an earlier run on this machine compiled."""
        tree = DraftTree(0, 1)
        tree.add_node(0, 0, Source.OTHER)
        worth = SourceWorth()
        worth.observe(tree, Acceptance([0], [0]))
        cut_trees([tree], worth, self._cost.of(1), 0, 0, 0.0, 0.0)

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
        """Skip a step in the middle of a pause.

        Returns:
            Whether it was skipped; if not, call :meth:`begin_step`, or nothing if this is no step
            to learn from.
        """
        experience = self._experiences.get(num_sequences.bit_length())
        return experience is not None and experience.backoff.skip_step()

    def begin_step(
        self, num_sequences: int, num_other_rows: int = 0, num_columns: int = 0
    ) -> StepBudget:
        """Begin a step.

        Args:
            num_sequences: those that choose a token, at least one.
            num_other_rows: rows of prompts in the same forward.
            num_columns: cached tokens of the ``num_sequences`` together.
        """
        size = num_sequences.bit_length()
        experience = self._experiences.get(size)
        if experience is None:
            experience = self._experiences[size] = Experience(self._cost, num_sequences)
        return StepBudget(self, experience, num_sequences, num_other_rows, num_columns)

    def corrections(self) -> Sequence[float]:
        """The observed worth of scores, by source."""
        return self._worth.corrections

    def observe(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful the scores of ``tree`` were."""
        if tree.num_draft_tokens:
            self._worth.observe(tree, acceptance)


class StepBudget:
    """The budget of one step, see :class:`DraftBudget`.

    Times are those of the whole step, but where a name says ``each``: what is remembered of steps
    is what they took for each of their sequences, whose number differs.

    A node's score is its probability of being accepted, so a step that keeps a set of nodes is
    worth ``number of sequences + sum of their scores`` tokens and costs what a forward costs with
    that many rows, of sequences of their length.  Nodes of all trees compete in one order; the best
    prefix of that order wins, down to no drafts at all.  Rows of prompts in the same forward are
    not part of that price; they make further rows cheaper or more expensive.

    Attributes:
        is_look: whether to look for drafts in this step.
        is_probe: whether this is only to see whether drafts pay again: looking at a part of the
            sequences is enough for that.
    """

    __slots__ = (
        "_beside_plain_s",
        "_budget",
        "_cost",
        "_experience",
        "_forward_s",
        "_looking_s",
        "_num_columns",
        "_num_kept",
        "_num_other_rows",
        "_num_sequences",
        "_plain_s",
        "_price_s",
        "is_look",
        "is_probe",
    )

    def __init__(
        self,
        budget: DraftBudget,
        experience: Experience,
        num_sequences: int,
        num_other_rows: int,
        num_columns: int,
    ) -> None:
        self._budget, self._experience = budget, experience
        self._num_sequences, self._num_other_rows = num_sequences, num_other_rows
        self._num_columns = num_columns
        self._cost = experience.cost.of(num_sequences)
        self._plain_s = self._forward_s = self._cost.plain_s(num_columns)
        """What a forward is expected to take without drafts, and with those that are kept."""
        self._num_kept = 0
        backoff = experience.backoff
        self.is_look, self.is_probe = backoff.begin_step(), backoff.is_probe
        if self.is_look:
            looking_each_s, plain_each_s = backoff.beside_forward_s()
            self._looking_s = num_sequences * looking_each_s
            self._beside_plain_s = num_sequences * plain_each_s
            self._price_s = experience.price.seconds(has_prompts=num_other_rows > 0)

    def least_score(self, max_drafts: int) -> float:
        """The score below which nodes need not be proposed, as :meth:`trim` would cut them.  Its
        worst outcome is the token rate of a step that looks for drafts and keeps none; at that rate
        such nodes are worth less than the cheapest possible row.

        Args:
            max_drafts: the most drafts of all sequences together, at least one.
        """
        least_more_s = self._price_s + self._cost.cheapest_draft_s(
            max_drafts, self._num_columns, self._num_other_rows
        )
        least_rate = self._num_sequences / (self._plain_s + max(0.0, self._looking_s))
        return min(1.0, least_rate * least_more_s / max(self._budget.corrections()))

    def trim(self, trees: Sequence[DraftTree]) -> None:
        """Truncate in place what was looked for: a tree for each sequence."""
        budget, number = self._budget, self._num_sequences
        num_proposed, num_kept, tokens, self._forward_s, plain_s = cut_trees(
            trees,
            budget._worth,
            self._cost,
            self._num_other_rows,
            self._num_columns,
            self._looking_s,
            self._price_s,
        )
        as_plain_s = tokens / number * (plain_s + self._beside_plain_s)
        drafting_s = self._forward_s + self._looking_s + self._price_s * num_kept
        self._experience.backoff.weigh((as_plain_s - drafting_s) / number, as_plain_s / number)
        budget.num_proposed_tokens += num_proposed
        budget.num_kept_tokens += num_kept
        self._num_kept = num_kept

    def took(self, step_s: float, forward_s: float, catching_up_s: float = 0.0) -> None:
        """Learn how long this step took, and how long its forward took.

        Args:
            step_s: the whole step, without ``catching_up_s``.
            catching_up_s: the time spent telling drafters of sequences and tokens that they had not
                heard of.

        A forward that takes longer than expected adds to the price of drafts, unless it has rows of
        prompts.
        """
        number, experience = self._num_sequences, self._experience
        backoff, price = experience.backoff, experience.price
        has_prompts = self._num_other_rows > 0
        num_each, beside_each_s = self._num_kept / number, (step_s - forward_s) / number
        more_each_s = None if has_prompts else (forward_s - self._forward_s) / number
        if self.is_probe:
            price.fade(1 + backoff.num_steps_since)
        elif self.is_look:
            price.add(num_each, beside_each_s, more_each_s)
        if more_each_s is None:
            own_each_s, price_s = beside_each_s, price.beside_forward_s(has_prompts=True)
        else:
            own_each_s, price_s = beside_each_s + more_each_s, price.seconds(has_prompts=False)
        backoff.took(
            max(own_each_s - num_each * price_s, min(0.0, own_each_s)),
            catching_up_s=catching_up_s / number,
            beside_prompts=has_prompts,
        )
        if not has_prompts:
            experience.note_forward(forward_s / self._forward_s, number)
