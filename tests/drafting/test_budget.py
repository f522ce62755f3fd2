"""The budget keeps the drafts that are worth their rows: the choice is tested, never the time."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.drafting.budget import DraftBudget, ForwardCost
from hdserve.tree import Acceptance, DraftTree

FREE = ForwardCost({1: 1.0, 100: 1.0})
"""Rows that cost nothing: memory-bound decoding."""

LINEAR = ForwardCost({1: 1.0, 2: 2.0})
"""Every row costs as much as the first: the hardware is full."""

COSTS = st.lists(st.floats(0.001, 3.0), min_size=1, max_size=8).map(
    lambda seconds: ForwardCost(dict(enumerate(seconds, start=1)))
)
SCORES = st.lists(st.floats(0.0, 1.0), max_size=5)


def make_tree(scores: list[float], source: Source = Source.OTHER, capacity: int = 40) -> DraftTree:
    """A tree of a node per score, below the root or each other in no particular way."""
    tree = DraftTree(0, capacity)
    for index, score in enumerate(scores):
        parent = index // 2 if index % 3 else 0
        tree.add_node(min(parent, len(tree) - 1), index, source, score)
    return tree


def rate(cost: ForwardCost, kept: list[list[float]], num_other_rows: int) -> float:
    """Expected tokens per second of a step, from the definition."""
    num_rows = num_other_rows + len(kept) + sum(map(len, kept))
    return (len(kept) + sum(map(sum, kept))) / float(cost(num_rows))


@settings(max_examples=150)
@given(
    scores=st.lists(SCORES, min_size=1, max_size=3), cost=COSTS, num_other_rows=st.integers(0, 6)
)
def test_the_choice_is_the_best_of_all(
    scores: list[list[float]], cost: ForwardCost, num_other_rows: int
) -> None:
    """No way of cutting the trees of a batch gives more tokens per second than the chosen one."""
    scores = [sorted(own, reverse=True) for own in scores]
    trees = [make_tree(own) for own in scores]
    DraftBudget(cost).trim(trees, num_other_rows)
    found = rate(cost, [tree.scores[1:] for tree in trees], num_other_rows)
    prefixes = [[own[:end] for end in range(len(own) + 1)] for own in scores]
    best = max(rate(cost, list(kept), num_other_rows) for kept in itertools.product(*prefixes))
    assert found == pytest.approx(best, rel=1e-9)


@given(scores=st.lists(SCORES, min_size=1, max_size=4), cost=COSTS)
def test_trees_are_cut_not_changed(scores: list[list[float]], cost: ForwardCost) -> None:
    """What is left of a tree is its beginning, in whatever order it was filled."""
    trees = [make_tree(own) for own in scores]
    before = [(list(tree.token_ids), list(tree.parents)) for tree in trees]
    DraftBudget(cost).trim(trees)
    for tree, (token_ids, parents) in zip(trees, before, strict=True):
        assert tree.token_ids == token_ids[: len(tree)]
        assert tree.parents == parents[: len(tree)]


@pytest.mark.parametrize("num_trees", [1, 3, 16])
def test_full_hardware_gets_no_drafts(num_trees: int) -> None:
    """Where a row costs what a step costs, no draft is verified, however likely."""
    trees = [make_tree([0.99, 0.95, 0.9]) for _ in range(num_trees)]
    DraftBudget(LINEAR).trim(trees)
    assert [tree.num_draft_tokens for tree in trees] == [0] * num_trees


def test_free_rows_get_all_drafts() -> None:
    """Where rows cost nothing, every draft that may be right is verified."""
    tree = make_tree([0.9, 0.5, 0.01])
    DraftBudget(FREE).trim([tree])
    assert tree.num_draft_tokens == 3


def test_rows_that_are_there_anyway_make_drafts_cheaper() -> None:
    """Beside a prompt's chunk the same drafts pay that do not pay alone."""
    cost = ForwardCost({1: 1.0, 4: 2.0, 64: 3.0})
    found = []
    for num_other_rows in (0, 40):
        tree = make_tree([0.3, 0.3, 0.3])
        DraftBudget(cost).trim([tree], num_other_rows)
        found.append(tree.num_draft_tokens)
    assert found == [0, 3]


def test_the_likelier_tree_gets_the_rows() -> None:
    """When only some rows pay, they go to the nodes that are worth most, over all sequences."""
    cost = ForwardCost({1: 1.0, 4: 1.0, 5: 50.0})
    likely, unlikely = make_tree([0.9, 0.8]), make_tree([0.5, 0.4])
    DraftBudget(cost).trim([unlikely, likely])
    assert (unlikely.num_draft_tokens, likely.num_draft_tokens) == (0, 2)


def test_nothing_to_cut() -> None:
    """No trees, and trees without drafts, are left alone."""
    budget = DraftBudget(LINEAR)
    budget.trim([])
    tree = DraftTree(3, 5)
    budget.trim([tree, DraftTree(4, 0)], 7)
    assert len(tree) == 1


# --- correction ---

STEEP = ForwardCost({1: 1.0, 2: 1.5, 3: 2.0})
"""A draft pays if it is right more often than every other time."""


def keeps(budget: DraftBudget, source: Source, score: float = 0.8) -> bool:
    tree = make_tree([score], source)
    budget.trim([tree])
    return tree.num_draft_tokens == 1


def observe(budget: DraftBudget, source: Source, *, is_right: bool, times: int) -> None:
    for _ in range(times):
        tree = make_tree([0.8], source)
        path = [0, 1] if is_right else [0]
        budget.observe(tree, Acceptance(path, [0] * len(path)))


def test_scores_are_corrected_by_what_they_turn_out_to_be_worth() -> None:
    """A source that promises too much is cut off, one that promises too little is not; neither
    changes what is thought of another."""
    budget = DraftBudget(STEEP)
    assert keeps(budget, Source.MODEL)
    assert not keeps(budget, Source.CONTEXT, 0.45)
    observe(budget, Source.MODEL, is_right=False, times=60)
    observe(budget, Source.CONTEXT, is_right=True, times=300)
    assert not keeps(budget, Source.MODEL)
    assert keeps(budget, Source.CONTEXT, 0.45)
    assert keeps(budget, Source.STATISTICS)


def test_right_scores_are_left_alone() -> None:
    """Scores that come true are not corrected, also where a tree names several alternatives."""
    budget = DraftBudget(STEEP)
    for step in range(400):
        tree = DraftTree(0, 4)
        for token_id in range(4):
            tree.add_node(0, token_id, Source.MODEL, 0.25)
        budget.observe(tree, Acceptance([0, 1 + step % 4], [0, 0]))
    assert keeps(budget, Source.MODEL, 0.51)
    assert not keeps(budget, Source.MODEL, 0.49)


def test_a_source_that_was_cut_off_is_tried_again() -> None:
    """A source that was useless for long is not cut off for ever: what is known of it fades, and
    when it is right by then it stays."""
    budget = DraftBudget(STEEP)
    observe(budget, Source.MODEL, is_right=False, times=1000)
    steps = next(step for step in range(10_000) if keeps(budget, Source.MODEL))
    assert steps > 100, "a useless source is tried again and again"
    observe(budget, Source.MODEL, is_right=True, times=50)
    assert keeps(budget, Source.MODEL)


# --- the cost of a forward ---


def test_cost_is_interpolated_and_goes_on() -> None:
    """Between points the cost is a straight line, beyond the last one the last slope goes on, and
    before the first one it is the first."""
    cost = ForwardCost({2: 1.0, 4: 2.0, 8: 3.0})
    assert cost([1, 2, 3, 4, 6, 8, 12]).tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert float(ForwardCost({4: 2.0})(8)) == 4.0


@given(st.dictionaries(st.integers(1, 64), st.floats(1e-6, 10.0), min_size=1, max_size=8))
def test_more_rows_never_cost_less(points: dict[int, float]) -> None:
    """A point that was measured too cheap does not make more rows cheaper than fewer."""
    seconds = ForwardCost(points)(list(range(1, 200))).tolist()
    assert all(math.isfinite(value) and value > 0 for value in seconds)
    for fewer, more in itertools.pairwise(seconds):
        assert more >= fewer * (1 - 1e-12)
