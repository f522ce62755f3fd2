"""Drafts of answers that must match a grammar: forced tokens first, no forbidden ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hdserve import core
from hdserve.core import Source
from hdserve.drafting.guarded import GuardedDrafters
from hdserve.drafting.pruning import Pruner
from hdserve.engine.structured_output.guide import GrammarGuide
from hdserve.tree import Acceptance, DraftTree

_CALL = "grammar", "propose"
"""The source under which its time and its failures are counted."""

_SCORE = 1.0
"""The score of a forced token; the budget learns its worth, as for all sources."""

_WIDTH, _MOST = 4, 64
"""Many nodes are forbidden, so this many times as many nodes are asked for as there is room for, up
to this limit, if there is room for fewer."""


class GrammarDrafts:
    """Asks the drafters for trees of sequences with a grammar.

    Such a tree begins with the tokens that the grammar forces; the drafters continue after them;
    nodes that the grammar forbids are left out.

    It fails open, as drafters do: if the grammar cannot be asked, which is counted, the sequence is
    from then on drafted for as if it had none.

    It adds 144 us to a step for each sequence, with 64 candidate nodes, and in 99 of 100 steps
    less than 300 us (a script outside the project, docs/adr/0021).  The lexer's work in it is
    bounded, as for a mask.
    """

    def __init__(self, drafters: GuardedDrafters) -> None:
        self._drafters = drafters
        self._pruner = Pruner()

    def propose(self, seq: core.Sequence, tree: DraftTree, corrections: Sequence[float]) -> None:
        """Fill ``tree``, which is empty."""
        guide = _guide(seq)
        capacity = max(tree.capacity, min(_WIDTH * tree.capacity, _MOST))
        wide = DraftTree(tree.token_ids[0], capacity, tree.max_depth, tree.min_score)
        if guide is not None and self._run(seq, _begin, guide, wide, tree.capacity):
            num_certain = wide.num_draft_tokens
            self._drafters.propose(seq, wide, corrections)
            if self._run(seq, _fill, guide, wide, num_certain, self._pruner, tree):
                return
        self._drafters.propose(seq, tree, corrections)

    def observe(self, seq: core.Sequence, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful the scores of a tree from :meth:`propose` were."""
        if _guide(seq) is not None:
            self._pruner.observe(tree, acceptance)

    def _run(self, seq: core.Sequence, function: Callable[..., bool], *arguments: object) -> bool:
        is_done = self._drafters.run(*_CALL, function, seq, *arguments)
        if is_done is None:
            seq.grammar_state.give_up_guide()
        return is_done is not None


def _guide(seq: core.Sequence) -> GrammarGuide | None:
    """``None`` also if a recording is repeated, as nothing holds that to the grammar."""
    guide: GrammarGuide | None = seq.grammar_state.guide
    return guide if seq.recorded_token_ids is None else None


def _begin(seq: core.Sequence, guide: GrammarGuide, wide: DraftTree, max_certain: int) -> bool:
    """Begin ``wide`` with the forced tokens."""
    guide.follow(seq.token_ids, seq.num_prompt_tokens)
    if seq.speculation.allows(Source.GRAMMAR):
        wide.add_path(guide.forced()[:max_certain], Source.GRAMMAR, _SCORE)
    return True


def _fill(
    seq: core.Sequence,
    guide: GrammarGuide,
    wide: DraftTree,
    num_certain: int,
    pruner: Pruner,
    tree: DraftTree,
) -> bool:
    """Copy into ``tree`` the nodes of ``wide`` that are allowed."""
    pruner.prune(wide, guide.allowed(wide, num_certain), tree)
    return True
