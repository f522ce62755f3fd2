"""The budget keeps the drafts that are worth their rows: the choice is tested, never the time."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.drafting.budget import DraftBudget
from hdserve.tree import Acceptance, DraftTree
from tests.drafting.budgets import FREE, make_budget, make_tree, next_look, trim

LINEAR = ForwardCost({1: 1.0, 2: 2.0})
"""Every row costs as much as the first: the hardware is full."""

COSTS = st.lists(st.floats(0.001, 3.0), min_size=1, max_size=8).map(
    lambda seconds: ForwardCost(dict(enumerate(seconds, start=1)))
)
SCORES = st.lists(st.floats(0.0, 1.0), max_size=5)


def rate(cost: ForwardCost, kept: list[list[float]], num_other_rows: int) -> float:
    """Expected tokens per second of a step, from the definition: of what it takes without the
    other rows and their drafts, and what the drafts make it longer beside the others."""
    num_nodes = sum(map(len, kept))
    plain_s, without_s, with_s = (
        float(cost(num_rows))
        for num_rows in (
            len(kept),
            num_other_rows + len(kept),
            num_other_rows + len(kept) + num_nodes,
        )
    )
    return (len(kept) + sum(map(sum, kept))) / (plain_s + with_s - without_s)


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
    trim(make_budget(cost), trees, num_other_rows)
    found = rate(cost, [tree.scores[1:] for tree in trees], num_other_rows)
    prefixes = [[own[:end] for end in range(len(own) + 1)] for own in scores]
    best = max(rate(cost, list(kept), num_other_rows) for kept in itertools.product(*prefixes))
    assert found == pytest.approx(best, rel=1e-9)


@given(scores=st.lists(SCORES, min_size=1, max_size=4), cost=COSTS)
def test_trees_are_cut_not_changed(scores: list[list[float]], cost: ForwardCost) -> None:
    """What is left of a tree is its beginning, in whatever order it was filled."""
    trees = [make_tree(own) for own in scores]
    before = [(list(tree.token_ids), list(tree.parents)) for tree in trees]
    trim(make_budget(cost), trees)
    for tree, (token_ids, parents) in zip(trees, before, strict=True):
        assert tree.token_ids == token_ids[: len(tree)]
        assert tree.parents == parents[: len(tree)]


@given(
    scores=st.lists(SCORES, min_size=1, max_size=3),
    cost=COSTS,
    num_other_rows=st.integers(0, 6),
    num_columns=st.integers(0, 50),
    num_accepted=st.integers(0, 40),
    looking=st.floats(-0.5, 0.5),
    draft_s=st.floats(0.0, 0.5),
)
def test_what_need_not_be_proposed_would_be_cut(
    scores: list[list[float]],
    cost: ForwardCost,
    num_other_rows: int,
    num_columns: int,
    num_accepted: int,
    looking: float,
    draft_s: float,
) -> None:
    """Trees without it are cut to what they are cut to with it, whatever is known of sources, the
    length of the sequences and the time that looking and drafts take."""
    steps = []
    for _ in range(2):
        budget = DraftBudget(BatchCost({1: cost}, column_cost=ForwardCost({1: 0.01, 2: 0.02})))
        for index in range(40):
            path = [0, 1] if index < num_accepted else [0]
            budget.observe(make_tree([0.5], Source.MODEL), Acceptance(path, [0] * len(path)))
        step = trim(budget, [DraftTree(0, 0) for _ in scores])
        step.took((1.0 + looking) * float(cost(len(scores))), 0.0)
        for number in (0, 4, 2) * 5:
            tree = make_tree([0.999] * number)
            step = next_look(budget, len(scores))
            step.trim([tree, *(DraftTree(0, 0) for _ in scores[1:])])
            forward_s = float(cost(len(scores) + tree.num_draft_tokens))
            beside_s = looking * float(cost(len(scores))) + draft_s * tree.num_draft_tokens
            step.took(forward_s + beside_s, forward_s)
        steps.append(next_look(budget, len(scores), num_other_rows, num_columns))
    max_drafts = sum(map(len, scores))
    least = steps[0].least_score(max_drafts) if max_drafts else 0.0
    kept = []
    for step, lowest in zip(steps, (-1.0, 0.999999 * least), strict=True):
        trees = []
        for own in scores:
            tree = DraftTree(0, len(own))
            for index, score in enumerate(sorted(own, reverse=True)):
                if score >= lowest:
                    source = Source.MODEL if index % 2 else Source.CONTEXT
                    tree.add_node(0, index, source, score)
            trees.append(tree)
        step.trim(trees)
        kept.append([tree.scores for tree in trees])
    assert kept[1] == kept[0]


@pytest.mark.parametrize("token_s", [0.0, 0.1, 0.25])
@pytest.mark.parametrize("is_forward", [False, True])
def test_the_choice_counts_what_drafts_turn_out_to_take(token_s: float, is_forward: bool) -> None:
    """Rows cost a twentieth of a step by themselves, and in the middle of others what they cost
    there: the forward takes longer than it was timed, or what comes after it does."""
    budget = make_budget(ForwardCost({1: 1.0, 2: 1.05}))
    for number in range(300):
        step, tree = next_look(budget, 1), make_tree([0.99] * (number % 7))
        step.trim([tree])
        drafting_s = token_s * tree.num_draft_tokens
        forward_s = 1.0 + 0.05 * tree.num_draft_tokens + drafting_s * is_forward
        step.took(forward_s + drafting_s * (not is_forward), forward_s)
    scores = [0.9, 0.5, 0.35, 0.25, 0.18, 0.12, 0.06]
    tree = make_tree(scores)
    trim(budget, [tree])
    rates = [
        (1.0 + sum(scores[:number])) / (1.0 + (0.05 + token_s) * number)
        for number in range(len(scores) + 1)
    ]
    assert tree.num_draft_tokens == rates.index(max(rates))


def take_steps(budget: DraftBudget, num_steps: int, token_s: float, row_s: float = 0.05) -> int:
    """Steps of one sequence with up to six drafts that are nearly certain, each of which takes
    ``row_s`` in the forward and ``token_s`` beside it.  Returns how many drafts were kept."""
    num_kept = 0
    for number in range(num_steps):
        step = budget.begin_step(1)
        tree = make_tree([0.99] * (number % 7 if step.is_look else 0))
        if step.is_look:
            step.trim([tree])
        forward_s = 1.0 + row_s * tree.num_draft_tokens
        step.took(forward_s + token_s * tree.num_draft_tokens, forward_s)
        num_kept += tree.num_draft_tokens
    return num_kept


def test_drafts_that_took_long_are_tried_again() -> None:
    """What they took while the machine did something else is forgotten, though steps without drafts
    tell nothing of it."""
    budget = make_budget(ForwardCost({1: 1.0, 2: 1.05}))
    take_steps(budget, 300, token_s=2.0)
    assert take_steps(budget, 100, token_s=2.0) == 0
    take_steps(budget, 5000, token_s=0.0)
    assert take_steps(budget, 70, token_s=0.0) > 190


def test_drafts_that_take_long_cost_next_to_nothing() -> None:
    """Where they stay dear, trying them again costs less than a hundredth."""
    budget = make_budget(ForwardCost({1: 1.0, 2: 1.05}))
    take_steps(budget, 300, token_s=1.2)
    assert take_steps(budget, 10_000, token_s=1.2) * (1.25 - 0.99) < 100


def test_what_prompts_take_beside_forwards_is_no_property_of_drafts() -> None:
    """Steps with a row of a prompt take longer and keep other drafts."""
    budget = make_budget(ForwardCost({1: 1.0, 2: 1.05}))
    for _ in range(60):
        take_steps(budget, 7, token_s=0.01)
        for _ in range(3):
            step = budget.begin_step(1, num_other_rows=1)
            if step.is_look:
                step.trim([make_tree([0.99] * 6)])
            step.took(1.0 + 0.3 + 5.0, 1.0 + 0.3)
    tree = make_tree([0.9, 0.5, 0.35, 0.25, 0.18, 0.12])
    trim(budget, [tree])
    assert tree.num_draft_tokens == 5


def test_more_is_proposed_where_scores_were_too_low() -> None:
    budget = make_budget(ForwardCost({1: 1.0, 2: 1.25}))
    assert budget.begin_step(1).least_score(1) == pytest.approx(0.25)
    for _ in range(200):
        budget.observe(make_tree([0.5]), Acceptance([0, 1], [0, 0]))
    assert budget.begin_step(1).least_score(1) == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize("num_trees", [1, 3, 16])
def test_full_hardware_gets_no_drafts(num_trees: int) -> None:
    """Where a row costs what a step costs, no draft is verified, however likely."""
    trees = [make_tree([0.99, 0.95, 0.9]) for _ in range(num_trees)]
    trim(make_budget(LINEAR), trees)
    assert [tree.num_draft_tokens for tree in trees] == [0] * num_trees


def test_free_rows_get_all_drafts() -> None:
    """Where rows cost nothing, every draft that may be right is verified."""
    tree = make_tree([0.9, 0.5, 0.01])
    trim(make_budget(FREE), [tree])
    assert tree.num_draft_tokens == 3


def test_rows_that_are_there_anyway_make_drafts_cheaper() -> None:
    """Beside a prompt's chunk the same drafts pay that do not pay alone."""
    cost = ForwardCost({1: 1.0, 4: 2.0, 64: 3.0})
    found = []
    for num_other_rows in (0, 40):
        tree = make_tree([0.3, 0.3, 0.3])
        trim(make_budget(cost), [tree], num_other_rows)
        found.append(tree.num_draft_tokens)
    assert found == [0, 3]


def test_what_prompts_take_is_not_saved_by_drafts() -> None:
    """An accepted token saves a step of decoding, not the prompt's chunk beside it, however long
    that takes."""
    cost = ForwardCost({1: 1.0, 2: 1.6, 41: 25.0, 64: 38.8})
    for num_other_rows in (0, 40):
        tree = make_tree([0.5])
        trim(make_budget(cost), [tree], num_other_rows)
        assert tree.num_draft_tokens == 0


def test_the_likelier_tree_gets_the_rows() -> None:
    """When only some rows pay, they go to the nodes that are worth most, over all sequences."""
    cost = ForwardCost({1: 1.0, 4: 1.0, 5: 50.0})
    likely, unlikely = make_tree([0.9, 0.8]), make_tree([0.5, 0.4])
    trim(make_budget(cost), [unlikely, likely])
    assert (unlikely.num_draft_tokens, likely.num_draft_tokens) == (0, 2)


def test_nothing_to_cut() -> None:
    """Trees without drafts are left alone."""
    tree = DraftTree(3, 5)
    trim(make_budget(LINEAR), [tree, DraftTree(4, 0)], 7)
    assert len(tree) == 1


def test_rows_of_more_sequences_have_a_price_of_their_own() -> None:
    """Drafts that pay for one sequence are cut where a batch was measured to make them dear."""
    budget = DraftBudget(BatchCost({1: FREE, 4: LINEAR}))
    kept = []
    for num_trees in (1, 4, 9):
        trees = [make_tree([0.8]) for _ in range(num_trees)]
        trim(budget, trees)
        kept.append(sum(tree.num_draft_tokens for tree in trees))
    assert kept == [1, 0, 0]


# --- correction ---

STEEP = ForwardCost({1: 1.0, 2: 1.5, 3: 2.0})
"""A draft pays if it is right more often than every other time."""


def keeps(budget: DraftBudget, source: Source, score: float = 0.8) -> bool:
    tree = make_tree([score], source)
    trim(budget, [tree])
    return tree.num_draft_tokens == 1


def observe(budget: DraftBudget, source: Source, *, is_right: bool, times: int) -> None:
    for _ in range(times):
        tree = make_tree([0.8], source)
        path = [0, 1] if is_right else [0]
        budget.observe(tree, Acceptance(path, [0] * len(path)))


def test_scores_are_corrected_by_what_they_turn_out_to_be_worth() -> None:
    """A source that promises too much is cut off, one that promises too little is not; neither
    changes what is thought of another."""
    budget = make_budget(STEEP)
    assert keeps(budget, Source.MODEL)
    assert not keeps(budget, Source.CONTEXT, 0.45)
    observe(budget, Source.MODEL, is_right=False, times=60)
    observe(budget, Source.CONTEXT, is_right=True, times=300)
    assert not keeps(budget, Source.MODEL)
    assert keeps(budget, Source.CONTEXT, 0.45)
    assert keeps(budget, Source.STATISTICS)


def test_right_scores_are_left_alone() -> None:
    """Scores that come true are not corrected, also where a tree names several alternatives."""
    budget = make_budget(STEEP)
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
    budget = make_budget(STEEP)
    observe(budget, Source.MODEL, is_right=False, times=1000)
    steps = next(step for step in range(10_000) if keeps(budget, Source.MODEL))
    assert steps > 100, "a useless source is tried again and again"
    observe(budget, Source.MODEL, is_right=True, times=50)
    assert keeps(budget, Source.MODEL)


# --- the cost of a forward ---


@pytest.mark.parametrize(("share", "is_affordable"), [(0.0, True), (0.02, True), (0.04, False)])
def test_forwards_are_read_where_it_pays(share: float, is_affordable: bool) -> None:
    """Finding the likeliest tokens is worth a small share of the forward."""
    cost = BatchCost({1: ForwardCost({1: 1.0, 16: 2.0})}, reading_share=share)
    assert DraftBudget(cost).affords_reading == is_affordable


def test_rows_of_long_sequences_have_a_price_of_their_own() -> None:
    """A draft that pays in a short context is cut in one that makes its row dear, of one sequence
    and of several."""
    cost = BatchCost(
        {1: FREE}, num_columns=100, column_cost=ForwardCost({1: 0.001, 2: 0.002, 4: 0.004})
    )
    for num_trees in (1, 3):
        kept = []
        for num_columns in (0, 100, 400, 4000):
            trees = [make_tree([0.5]) for _ in range(num_trees)]
            trim(DraftBudget(cost), trees, num_columns=num_trees * num_columns)
            kept.append(sum(tree.num_draft_tokens for tree in trees))
        assert kept == [num_trees, num_trees, num_trees, 0]


def look_in_vain(budget: DraftBudget, num_steps: int) -> int:
    """Steps of one sequence, which take a tenth more where drafts are looked for, and none is worth
    a row.  Returns how many looked."""
    num_looks = 0
    for _ in range(num_steps):
        step = budget.begin_step(1)
        if step.is_look:
            step.trim([make_tree([0.01])])
        step.took(1.0 + 0.1 * step.is_look, 1.0)
        num_looks += step.is_look
    return num_looks


@pytest.mark.parametrize("is_vain_at_first", [False, True])
@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0, 5.0])
def test_forwards_that_were_measured_too_slow(factor: float, is_vain_at_first: bool) -> None:
    """Something else kept the machine busy when the engine started: as many drafts are verified as
    if it had not, and where they do not pay, they are not looked for all the time."""
    budget = make_budget(ForwardCost({1: factor, 17: factor * 4.2}))
    if is_vain_at_first:
        assert look_in_vain(budget, 1000) < 150
    take_steps(budget, 600, token_s=0.0, row_s=0.2)
    scores = [0.9**depth for depth in range(1, 17)]
    tree = make_tree(scores)
    trim(budget, [tree])
    rates = [(1.0 + sum(scores[:number])) / (1.0 + 0.2 * number) for number in range(17)]
    best = rates.index(max(rates))
    assert best - 1 <= tree.num_draft_tokens <= best
    assert look_in_vain(budget, 1000) < 150


def test_another_cost_changes_the_choice() -> None:
    """After a change of the cost, trees are cut by the new one."""
    budget = make_budget(FREE)
    for num_kept in (3, 0):
        tree = DraftTree(1, 3)
        tree.add_path([2, 3, 4], Source.CONTEXT, 0.5)
        trim(budget, [tree])
        assert tree.num_draft_tokens == num_kept
        budget.change_cost(BatchCost({1: LINEAR}))


def test_warming_up_teaches_nothing() -> None:
    budget, fresh = make_budget(FREE), make_budget(FREE)
    budget.warm_up()
    assert budget.corrections() == fresh.corrections()
    assert budget.num_proposed_tokens == budget.num_kept_tokens == 0


@pytest.mark.parametrize("seconds", [(0.0, 0.0), (-1.0, 0.0), (1e-3, math.inf), (math.nan, 1e-3)])
def test_forwards_whose_time_is_not_known_can_be_budgeted(seconds: tuple[float, ...]) -> None:
    """As with a clock that stood still."""
    budget = DraftBudget(BatchCost({1: ForwardCost(dict(zip((1, 64), seconds, strict=True)))}))
    for _ in range(50):
        step = next_look(budget, 2)
        trees = [DraftTree(0, 4) for _ in range(2)]
        for tree in trees:
            tree.add_node(0, 1, Source.MODEL, 0.5)
        step.trim(trees)
        step.took(0.0, 0.0)
    assert 0.0 <= next_look(budget, 2).least_score(4) <= 1.0
