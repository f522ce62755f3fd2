"""What is left of a tree where something cannot come, and what it is worth then."""

from __future__ import annotations

import itertools
import random

import pytest

from hdserve.core import Source
from hdserve.drafting.pruning import Pruner
from hdserve.tree import Acceptance, DraftTree
from tests.drafting.helpers import check_tree, scores_by_path


def pruned(tree: DraftTree, may_come: list[bool], capacity: int = 9) -> DraftTree:
    kept = DraftTree(tree.token_ids[0], capacity)
    Pruner().prune(tree, may_come, kept)
    check_tree(kept)
    return kept


def test_what_cannot_come_leaves_its_share_to_its_siblings() -> None:
    """Of the tokens after the root 60 % cannot come, and behind the token 2 a third of what is
    left of it: under that condition 2 comes with 0.3 of 0.4, and 4 behind it with a half."""
    tree = DraftTree(0, 9)
    tree.add_node(0, 1, Source.MODEL, 0.6)
    tree.add_node(0, 2, Source.CONTEXT, 0.3)
    tree.add_node(2, 3, Source.MODEL, 0.1)
    tree.add_node(2, 4, Source.CONTEXT, 0.1)
    kept = pruned(tree, [True, False, True, False, True])
    assert scores_by_path(kept) == pytest.approx({(0,): 1.0, (0, 2): 0.75, (0, 2, 4): 0.375})
    assert kept.sources[1:] == [Source.CONTEXT, Source.CONTEXT]


def test_a_tree_of_which_all_may_come_stays_as_it_is() -> None:
    tree = DraftTree(0, 9)
    tree.add_path([1, 2, 3], Source.MODEL, 0.5)
    assert pruned(tree, [True] * 4).scores == tree.scores
    assert pruned(tree, [True] * 4, 2).token_ids == [0, 1, 2]


def test_scores_that_are_no_estimates_stay() -> None:
    """Siblings of 1 each promise more than there is."""
    tree = DraftTree(0, 9)
    for token_id in (1, 2, 3):
        tree.add_node(0, token_id, Source.OTHER)
    kept = pruned(tree, [True, False, True, True])
    assert kept.token_ids == [0, 2, 3]
    assert kept.scores == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_are_kept_behind_their_parents(seed: int) -> None:
    """Whatever cannot come, scores are probabilities, none below what it was, and no node is above
    its parent or above one before it."""
    draw = random.Random(seed)
    tree = DraftTree(0, 40)
    while not tree.is_full:
        parent = draw.randrange(len(tree))
        tree.add_node(parent, draw.randrange(30), Source.MODEL, tree.scores[parent] * draw.random())
    may_come = [True]
    for parent in tree.parents[1:]:
        may_come.append(may_come[parent] and draw.random() < 0.7)
    kept = pruned(tree, may_come, 12)
    before = scores_by_path(tree)
    assert kept.num_draft_tokens == min(12, sum(may_come) - 1)
    assert all(
        score >= min(0.997, before[path]) - 1e-9 for path, score in scores_by_path(kept).items()
    )
    assert all(a >= b for a, b in itertools.pairwise(kept.scores))
    allowed = {path for path, may in zip(before, may_come, strict=True) if may}
    assert {*scores_by_path(kept)} <= allowed


def test_it_is_learned_what_scores_are_worth() -> None:
    """Of guesses that come half of the time, and are thought to come one time in four; after them
    the same tree has the right scores, and what is certain keeps its own."""
    pruner, tree = Pruner(), DraftTree(0, 9)
    tree.add_path([9], Source.GRAMMAR)
    tree.add_node(1, 1, Source.MODEL, 0.2)
    tree.add_node(1, 2, Source.MODEL, 0.2)
    for step in range(4000):
        kept = DraftTree(0, 9)
        pruner.prune(tree, [True, True, False, True], kept)
        pruner.observe(kept, Acceptance([0, 1, 2] if step % 2 else [0, 1], [9, 2, 3]))
    assert pruner.worth == pytest.approx(2.0, rel=0.1)
    assert kept.scores == pytest.approx([1.0, 1.0, 0.5], rel=0.1)
