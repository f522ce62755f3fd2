"""Drafts of answers that must match a grammar: what it forces, and nothing that it forbids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hdserve import core
from hdserve.core import Source
from hdserve.drafting.guarded import GuardedDrafters
from hdserve.drafting.pruning import Pruner
from hdserve.engine.grammar_guide import GrammarGuide
from hdserve.tree import Acceptance, DraftTree

_CALL = "grammar", "propose"
"""As what it is timed, and its failures are counted."""

_SCORE = 1.0
"""Of a forced token; what comes of it is seen by the budget, as of all sources."""

_WIDTH, _MOST = 4, 64
"""Many nodes are forbidden, so that so many times those that there is room for are asked for, but
no more than these, where there is room for fewer."""


class GrammarDrafts:
    """Asks the drafters for trees of sequences with a grammar.

    Such a tree begins with the tokens that the grammar leaves no choice of, which the drafters go
    on behind, and has no node that it forbids.

    It fails open, as drafters do: where the grammar cannot be asked, which is counted, the sequence
    is drafted for as if it had none from then on.

    A step takes 144 us more for each sequence, with 64 guesses that are looked at, and 99 in 100
    less than 300 us (a script outside the project, docs/adr/0021).  What the lexer may do in it is
    bounded, as it is for a mask.
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
        """Learn what the scores of a tree from :meth:`propose` were worth."""
        if _guide(seq) is not None:
            self._pruner.observe(tree, acceptance)

    def _run(self, seq: core.Sequence, function: Callable[..., bool], *arguments: object) -> bool:
        is_done = self._drafters.run(*_CALL, function, seq, *arguments)
        if is_done is None:
            seq.grammar_state.give_up_guide()
        return is_done is not None


def _guide(seq: core.Sequence) -> GrammarGuide | None:
    """``None`` where a recording is repeated, too, which nothing holds to the grammar."""
    guide: GrammarGuide | None = seq.grammar_state.guide
    return guide if seq.recorded_token_ids is None else None


def _begin(seq: core.Sequence, guide: GrammarGuide, wide: DraftTree, max_certain: int) -> bool:
    """Begin ``wide`` with what is forced."""
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
    """Fill ``tree`` with what is allowed of ``wide``."""
    pruner.prune(wide, guide.allowed(wide, num_certain), tree)
    return True
