"""The drafts of a step: which sequences get a tree, how large it is, and what drafters learn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

from hdserve import core
from hdserve.drafting.base import Verified
from hdserve.drafting.budget import DraftBudget, StepBudget
from hdserve.drafting.guarded import GuardedDrafters
from hdserve.drafting.merging import UNCORRECTED
from hdserve.engine.scheduling.scheduler import Scheduled
from hdserve.engine.structured_output.drafts import GrammarDrafts
from hdserve.tree import Acceptance, DraftTree

_MAX_STARTED_TOKENS = 8192
"""The most tokens of the texts that drafters are started with in one step, but at least one text.
A thousand tokens take about a millisecond."""

_MAX_TRIED_TOKENS = 512
"""The same limit while drafts do not pay, so that less of this work is wasted."""


class _Look(NamedTuple):
    """How drafts are looked for in a step.

    Attributes:
        min_score: of a draft.
        max_started_tokens: the limit on the texts that drafters are started with.
        corrections: of the scores, by source.
    """

    min_score: float = 0.0
    max_started_tokens: int = _MAX_STARTED_TOKENS
    corrections: Sequence[float] = UNCORRECTED


class StepDrafts:
    """Asks the drafters for trees, cuts them to the size that pays, and reports the results.

    Drafters are started with a text, and told of tokens that were decoded without them, only when a
    draft is wanted next, so that steps without drafts cost nothing.

    Args:
        budget: cuts the trees of a step to the size that pays; ``None`` verifies them whole.
        max_draft_tokens: most drafted tokens of a sequence and step.
        max_depth: longest drafted path.
        may_follow_prompts: whether drafts may follow a prompt that goes through the model in the
            same forward.
    """

    def __init__(
        self,
        drafters: GuardedDrafters,
        budget: DraftBudget | None,
        max_draft_tokens: int,
        max_depth: int,
        *,
        may_follow_prompts: bool,
    ) -> None:
        self.drafters = drafters
        self._grammar_drafts = GrammarDrafts(drafters)
        self.budget = budget
        self.max_draft_tokens = max_draft_tokens
        self._max_depth = max_depth
        self._may_follow_prompts = may_follow_prompts
        self._num_started_tokens = 0
        self._catching_up_s = 0.0
        self._step_budget: StepBudget | None = None
        """These three are set for each step; the last is ``None`` if nothing is learned from it."""

    @property
    def are_read(self) -> bool:
        """Whether drafters see the model's output at each node."""
        budget = self.budget
        return budget is None or budget.affords_reading or self.drafters.needs_hidden

    def trees(self, scheduled: Sequence[Scheduled]) -> list[DraftTree | None]:
        """A tree per sequence that is to choose a token; ``None`` inside a prompt.

        The budget learns nothing of steps in which no sequence may draft: they would look as if
        drafts did not pay.
        """
        self._num_started_tokens, self._catching_up_s, self._step_budget = 0, 0.0, None
        budget = self.budget
        if budget is None:
            return self._trees(scheduled, _Look())
        choosing = [work for work in scheduled if work.is_choosing]
        number = len(choosing)
        if budget.skip_step(number) or not any(map(self._may_draft, choosing)):
            return self._trees(scheduled, None)
        num_other_rows = sum([work.num_tokens for work in scheduled]) - number
        num_columns = sum([len(work.slot.seq.token_ids) for work in choosing]) - number
        step = self._step_budget = budget.begin_step(number, num_other_rows, num_columns)
        if not step.is_look:
            return self._trees(scheduled, None)
        look = _Look(
            step.least_score(self.max_draft_tokens * number),
            _MAX_TRIED_TOKENS if step.is_probe else _MAX_STARTED_TOKENS,
            budget.corrections(),
        )
        trees = self._trees(scheduled, look)
        step.trim([tree for tree in trees if tree is not None])
        return trees

    def _trees(self, scheduled: Sequence[Scheduled], look: _Look | None) -> list[DraftTree | None]:
        trees: list[DraftTree | None] = []
        asked: list[tuple[core.Sequence, DraftTree]] = []
        for work in scheduled:
            tree = self._empty_tree(work, look) if work.is_choosing else None
            trees.append(tree)
            if tree is not None and self._are_told(tree):
                asked.append((work.slot.seq, tree))
        if asked:
            started = time.perf_counter()
            self._catch_up([seq for seq, _ in asked])
            self._catching_up_s = time.perf_counter() - started
        for seq, tree in asked:
            if look is not None and tree.capacity:
                proposes = self.drafters if seq.grammar_state is None else self._grammar_drafts
                proposes.propose(seq, tree, look.corrections)
        return trees

    def _empty_tree(self, work: Scheduled, look: _Look | None) -> DraftTree:
        """An empty tree with the capacity it may use."""
        seq = work.slot.seq
        max_depth = min(self._max_depth, seq.num_remaining_tokens - 1)
        if look is None or not self._may_draft(work):
            return DraftTree(seq.token_ids[-1], 0, max_depth)
        capacity = self._capacity(seq, look.max_started_tokens)
        return DraftTree(seq.token_ids[-1], capacity, max_depth, look.min_score)

    def _may_draft(self, work: Scheduled) -> bool:
        """Whether drafts of a sequence can be wanted, and verified, in this step."""
        seq = work.slot.seq
        speculation = seq.speculation
        return (
            speculation.is_enabled
            and speculation.max_draft_tokens != 0
            and min(self._max_depth, seq.num_remaining_tokens - 1) > 0
            and work.may_draft
            and (self._may_follow_prompts or work.is_decoding)
        )

    def _capacity(self, seq: core.Sequence, max_started_tokens: int) -> int:
        """The most drafts that ``seq``, which may draft, may have now."""
        wanted, capacity = seq.speculation.max_draft_tokens, self.max_draft_tokens
        if wanted is not None:
            capacity = min(capacity, index(wanted))
        return capacity if capacity and self._may_know(seq, max_started_tokens) else 0

    def _may_know(self, seq: core.Sequence, max_started_tokens: int) -> bool:
        """Whether drafters know ``seq`` or may be started with it; if it is new, it counts towards
        the limit of the step."""
        if self.drafters.has_started(seq) or self.drafters.needs_hidden:
            return True
        if self._num_started_tokens >= max_started_tokens:
            return False
        self._num_started_tokens += len(seq.speculation.prediction) + len(seq.token_ids)
        return True

    def _are_told(self, tree: DraftTree) -> bool:
        """Whether drafters need to know the text now."""
        return tree.capacity > 0 or self.drafters.needs_hidden

    def _catch_up(self, sequences: Sequence[core.Sequence]) -> None:
        """Tell drafters the texts, whose last tokens may have been decoded without them."""
        behind: list[Verified] = []
        for seq in sequences:
            number, seq.num_unobserved_tokens = seq.num_unobserved_tokens, 0
            if not self.drafters.has_started(seq):
                self.drafters.start(seq)
            elif number:
                behind.append(_told_later(seq, number))
        if behind:
            self.drafters.observe(behind)

    def observe(self, verified: Sequence[Verified]) -> None:
        """Tell budget and drafters the results of this step's trees."""
        told: list[Verified] = []
        are_read = self.are_read
        for one in verified:
            if not self._are_told(one.tree):  # it cannot have drafts
                one.seq.num_unobserved_tokens += len(one.acceptance.token_ids)
                continue
            if self.budget is not None:
                self.budget.observe(one.tree, one.acceptance)
            if one.seq.grammar_state is not None:
                self._grammar_drafts.observe(one.seq, one.tree, one.acceptance)
            told.append(one if are_read else one._replace(forward=None))
        if told:
            self.drafters.observe(told)

    def took(self, step_s: float, forward_s: float) -> float:
        """Record how long the step took, and its forward.

        Returns:
            The time of the step without catching up, which belongs to earlier steps.
        """
        own_s = step_s - self._catching_up_s
        if self._step_budget is not None:
            self._step_budget.took(own_s, forward_s, self._catching_up_s)
        return own_s


def _told_later(seq: core.Sequence, number: int) -> Verified:
    """The last ``number`` tokens of ``seq``, as reported to drafters that did not draft them."""
    root, *token_ids = seq.token_ids[-number - 1 :]
    num_drafted = number - 1
    tree = DraftTree(root, num_drafted)
    sources = [core.Source.PLAIN] * num_drafted
    parents, depths = range(num_drafted), range(1, number)
    tree.add_behind(token_ids[:-1], parents, sources, [1.0] * num_drafted, depths)
    return Verified(seq, tree, Acceptance(range(number), token_ids), None)
