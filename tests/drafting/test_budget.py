"""The budget keeps the drafts that are worth their rows: the choice is tested, never the time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.drafting.budget import DraftBudget
from hdserve.tree import Acceptance, DraftTree

FREE = ForwardCost({1: 1.0, 100: 1.0})
"""Rows that cost nothing: memory-bound decoding."""

LINEAR = ForwardCost({1: 1.0, 2: 2.0})
"""Every row costs as much as the first: the hardware is full."""

COSTS = st.lists(st.floats(0.001, 3.0), min_size=1, max_size=8).map(
    lambda seconds: ForwardCost(dict(enumerate(seconds, start=1)))
)
SCORES = st.lists(st.floats(0.0, 1.0), max_size=5)


def make_budget(cost: ForwardCost) -> DraftBudget:
    """A budget for rows that cost the same whomever they belong to."""
    return DraftBudget(BatchCost({1: cost}))


def make_tree(scores: list[float], source: Source = Source.OTHER, capacity: int = 40) -> DraftTree:
    """A tree of a node per score, below the root or each other in no particular way."""
    tree = DraftTree(0, capacity)
    for index, score in enumerate(scores):
        parent = index // 2 if index % 3 else 0
        tree.add_node(min(parent, len(tree) - 1), index, source, score)
    return tree


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
    make_budget(cost).trim(trees, num_other_rows)
    found = rate(cost, [tree.scores[1:] for tree in trees], num_other_rows)
    prefixes = [[own[:end] for end in range(len(own) + 1)] for own in scores]
    best = max(rate(cost, list(kept), num_other_rows) for kept in itertools.product(*prefixes))
    assert found == pytest.approx(best, rel=1e-9)


@given(scores=st.lists(SCORES, min_size=1, max_size=4), cost=COSTS)
def test_trees_are_cut_not_changed(scores: list[list[float]], cost: ForwardCost) -> None:
    """What is left of a tree is its beginning, in whatever order it was filled."""
    trees = [make_tree(own) for own in scores]
    before = [(list(tree.token_ids), list(tree.parents)) for tree in trees]
    make_budget(cost).trim(trees)
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
)
def test_what_need_not_be_proposed_would_be_cut(
    scores: list[list[float]],
    cost: ForwardCost,
    num_other_rows: int,
    num_columns: int,
    num_accepted: int,
    looking: float,
) -> None:
    """Trees without it are cut to what they are cut to with it, whatever is known of sources, the
    length of the sequences and the time that looking takes."""
    budgets = []
    for _ in range(2):
        budget = DraftBudget(BatchCost({1: cost}, column_cost=ForwardCost({1: 0.01, 2: 0.02})))
        for index in range(40):
            path = [0, 1] if index < num_accepted else [0]
            budget.observe(make_tree([0.5], Source.MODEL), Acceptance(path, [0] * len(path)))
        budget.wants_drafts(len(scores))
        budget.trim([DraftTree(0, 0) for _ in scores])
        budget.took((1.0 + looking) * float(cost(len(scores))), 0.0)
        budgets.append(budget)
    max_drafts = sum(map(len, scores))
    least = budgets[0].least_score(max_drafts, len(scores), num_other_rows, num_columns)
    kept = []
    for budget, lowest in zip(budgets, (-1.0, 0.999999 * least), strict=True):
        trees = []
        for own in scores:
            tree = DraftTree(0, len(own))
            for index, score in enumerate(sorted(own, reverse=True)):
                if score >= lowest:
                    source = Source.MODEL if index % 2 else Source.CONTEXT
                    tree.add_node(0, index, source, score)
            trees.append(tree)
        budget.trim(trees, num_other_rows, num_columns)
        kept.append([tree.scores for tree in trees])
    assert kept[1] == kept[0]


def test_more_is_proposed_where_scores_were_too_low() -> None:
    budget = make_budget(ForwardCost({1: 1.0, 2: 1.25}))
    assert budget.least_score(1, 1) == pytest.approx(0.25)
    for _ in range(200):
        budget.observe(make_tree([0.5]), Acceptance([0, 1], [0, 0]))
    assert budget.least_score(1, 1) == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize("num_trees", [1, 3, 16])
def test_full_hardware_gets_no_drafts(num_trees: int) -> None:
    """Where a row costs what a step costs, no draft is verified, however likely."""
    trees = [make_tree([0.99, 0.95, 0.9]) for _ in range(num_trees)]
    make_budget(LINEAR).trim(trees)
    assert [tree.num_draft_tokens for tree in trees] == [0] * num_trees


def test_free_rows_get_all_drafts() -> None:
    """Where rows cost nothing, every draft that may be right is verified."""
    tree = make_tree([0.9, 0.5, 0.01])
    make_budget(FREE).trim([tree])
    assert tree.num_draft_tokens == 3


def test_rows_that_are_there_anyway_make_drafts_cheaper() -> None:
    """Beside a prompt's chunk the same drafts pay that do not pay alone."""
    cost = ForwardCost({1: 1.0, 4: 2.0, 64: 3.0})
    found = []
    for num_other_rows in (0, 40):
        tree = make_tree([0.3, 0.3, 0.3])
        make_budget(cost).trim([tree], num_other_rows)
        found.append(tree.num_draft_tokens)
    assert found == [0, 3]


def test_what_prompts_take_is_not_saved_by_drafts() -> None:
    """An accepted token saves a step of decoding, not the prompt's chunk beside it, however long
    that takes."""
    cost = ForwardCost({1: 1.0, 2: 1.6, 41: 25.0, 64: 38.8})
    for num_other_rows in (0, 40):
        tree = make_tree([0.5])
        make_budget(cost).trim([tree], num_other_rows)
        assert tree.num_draft_tokens == 0


def test_the_likelier_tree_gets_the_rows() -> None:
    """When only some rows pay, they go to the nodes that are worth most, over all sequences."""
    cost = ForwardCost({1: 1.0, 4: 1.0, 5: 50.0})
    likely, unlikely = make_tree([0.9, 0.8]), make_tree([0.5, 0.4])
    make_budget(cost).trim([unlikely, likely])
    assert (unlikely.num_draft_tokens, likely.num_draft_tokens) == (0, 2)


def test_nothing_to_cut() -> None:
    """No trees, and trees without drafts, are left alone."""
    budget = make_budget(LINEAR)
    assert not budget.wants_drafts(0)
    budget.trim([])
    budget.took(1.0, 1.0)
    tree = DraftTree(3, 5)
    budget.trim([tree, DraftTree(4, 0)], 7)
    assert len(tree) == 1


def test_rows_of_more_sequences_have_a_price_of_their_own() -> None:
    """Drafts that pay for one sequence are cut where a batch was measured to make them dear."""
    budget = DraftBudget(BatchCost({1: FREE, 4: LINEAR}))
    kept = []
    for num_trees in (1, 4, 9):
        trees = [make_tree([0.8]) for _ in range(num_trees)]
        budget.trim(trees)
        kept.append(sum(tree.num_draft_tokens for tree in trees))
    assert kept == [1, 0, 0]


# --- pauses ---


def steps_with_drafts(
    budget: DraftBudget,
    num_steps: int,
    looking_s: float,
    *,
    plain_s: float = 0.0,
    catching_up_s: float = 0.0,
    first_look_s: float = 0.0,
    scores: Sequence[Sequence[float]] = ((0.5,),),
) -> list[int]:
    """In which of ``num_steps`` steps of one sequence, with forwards of a second, drafts are looked
    for.

    Args:
        looking_s, plain_s: what a step takes beside its forward, with drafts and without.
        catching_up_s: of a step with drafts.
        first_look_s: what a look after a pause takes more.
        scores: what looks find, one after the other and then again.
    """
    found: list[int] = []
    for step in range(num_steps):
        if budget.wants_drafts(1):
            more_s = 0.0 if found and found[-1] == step - 1 else first_look_s
            budget.trim([make_tree(list(scores[len(found) % len(scores)]))])
            budget.took(1.0 + looking_s + more_s, 1.0, catching_up_s)
            found.append(step)
        else:
            budget.trim([DraftTree(0, 0)])
            budget.took(1.0 + plain_s, 1.0)
    return found


def test_looking_for_drafts_pauses_where_it_does_not_pay() -> None:
    """Not at all while it pays, else longer and longer, but never for ever; each number of
    sequences by itself."""
    budget = make_budget(FREE)
    assert steps_with_drafts(budget, 100, looking_s=0.4) == list(range(100))
    looked = steps_with_drafts(budget, 2000, looking_s=0.6)
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(looked)]
    compared, first = [index for index, pause in enumerate(pauses) if pause][:2]
    assert pauses[compared] == 3, "what plain steps take is found out first"
    assert pauses[first : first + 7] == [1, 2, 4, 8, 16, 20, 20]
    assert first > compared + 1, "one step proves nothing"
    assert all(budget.wants_drafts(2) for _ in range(10))


@pytest.mark.parametrize("looking_s", [0.55, 0.6, 1.0, 2.0])
def test_looking_costs_next_to_nothing_where_it_never_pays(looking_s: float) -> None:
    """The more it costs, the rarer it is."""
    budget = make_budget(FREE)
    steps_with_drafts(budget, 1000, looking_s)
    num_steps = 5000
    num_looks = len(steps_with_drafts(budget, num_steps, looking_s))
    num_tokens = num_steps + 0.5 * num_looks
    seconds = num_steps + looking_s * num_looks
    assert num_looks >= num_steps / 260
    assert num_tokens / seconds >= 0.985


def test_of_a_pause_only_the_end_is_timed() -> None:
    """Looks come when they would if all steps were; those that nobody asks of are left alone."""
    budget, timed = make_budget(FREE), make_budget(FREE)
    expected = steps_with_drafts(timed, 3000, looking_s=2.0)
    looked, asked = list[int](), list[int]()
    for step in range(3000):
        is_looking = budget.wants_drafts(1)
        if is_looking:
            looked.append(step)
        elif not budget.wants_times(1):
            budget.took(1000.0, 1.0)
            continue
        else:
            asked.append(step)
        budget.trim([make_tree([0.5]) if is_looking else DraftTree(0, 0)])
        budget.took(3.0 if is_looking else 1.0, 1.0)
    assert looked == expected
    pauses = [range(first + 1, last) for first, last in itertools.pairwise(looked)]
    wanted = [step for pause in pauses for step in pause[-9:]]
    assert [step for step in asked if step < looked[-1]] == wanted
    assert max(len(pause) for pause in pauses) > 100


def test_what_drafters_catch_up_with_is_part_of_a_look() -> None:
    """Where they begin with many sequences at the end of a pause, pauses are longer; what they
    begin with while drafts pay is no reason to pause."""
    budget = make_budget(FREE)
    assert steps_with_drafts(budget, 100, looking_s=0.4, catching_up_s=5.0) == list(range(100))
    looked = steps_with_drafts(budget, 2000, looking_s=0.6, catching_up_s=0.3)
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(looked)]
    assert pauses[-3:] == [80, 80, 80], "(0.1 + 0.3) / 0.005"


def test_a_pause_ends_when_drafts_pay() -> None:
    """It is tried again, and goes on when it pays by then."""
    budget = make_budget(FREE)
    steps_with_drafts(budget, 1000, looking_s=0.6)
    looked = steps_with_drafts(budget, 2000, looking_s=0.0)
    assert looked[-100:] == list(range(1900, 2000))


def test_a_look_that_gains_is_followed_by_another() -> None:
    """It may have been at a part of the sequences, as looks are that lose."""
    budget = make_budget(FREE)
    assert not budget.is_trying(1)
    steps_with_drafts(budget, 1000, looking_s=0.6)
    assert budget.is_trying(1)
    assert not budget.is_trying(2)
    while budget.is_trying(1):
        steps_with_drafts(budget, 1, looking_s=0.0)
    assert steps_with_drafts(budget, 1, looking_s=0.0) == [0]


def test_that_the_first_steps_take_long_is_no_reason_to_pause() -> None:
    """Everything does that is done for the first time."""
    budget = make_budget(FREE)
    assert steps_with_drafts(budget, 4, looking_s=5.0) == [0, 1, 2, 3]
    assert steps_with_drafts(budget, 100, looking_s=0.4) == list(range(100))


def test_finding_nothing_is_no_reason_to_pause_if_it_is_quick() -> None:
    """Time, not luck, decides: drafts that may come later are not missed."""
    budget = make_budget(FREE)
    for _ in range(50):
        assert budget.wants_drafts(1)
        budget.trim([make_tree([])])
        budget.took(1.0, 1.0)


def test_what_plain_steps_take_is_no_loss() -> None:
    """A step that is long with drafts and without them is no reason to pause, but for the few steps
    in which it is found out, now and then, that it is long without them, too."""
    budget = make_budget(FREE)
    looked = steps_with_drafts(budget, 2000, looking_s=2.2, plain_s=2.0)
    assert len(looked) >= 2000 - 3 * (2000 // 256 + 1)


def test_rare_large_gains_outweigh_frequent_losses() -> None:
    """Most looks find nothing, but what the others find is worth more than all of them take."""
    budget = make_budget(FREE)
    rare = [(), (), (), (0.95, 0.9, 0.9, 0.9)]
    looked = steps_with_drafts(budget, 2000, looking_s=0.6, scores=rare)
    assert len(looked) > 1900


def test_looks_after_pauses_do_not_tell_what_looks_in_a_row_take() -> None:
    """They take longer, and yet drafting goes on as soon as it pays in a row."""
    budget = make_budget(FREE)
    scores = [(0.3,)]
    looked = steps_with_drafts(budget, 2000, looking_s=0.4, first_look_s=0.3, scores=scores)
    assert len(looked) < 300
    looked = steps_with_drafts(budget, 2000, looking_s=0.4, first_look_s=0.3)
    assert len(looked) > 1500


def test_what_plain_steps_took_is_found_out_again() -> None:
    """Though they were held for so long that drafts seem to gain whatever they take."""
    budget = make_budget(FREE)
    steps_with_drafts(budget, 200, looking_s=2.2, plain_s=2.0)
    steps_with_drafts(budget, 1000, looking_s=0.6)
    assert len(steps_with_drafts(budget, 1000, looking_s=0.6)) < 100


def test_one_long_step_is_no_reason_to_pause() -> None:
    """What has nothing to do with drafts, such as other work of the machine, does not count."""
    budget = make_budget(FREE)
    for step in range(200):
        assert budget.wants_drafts(1)
        budget.trim([make_tree([0.5])])
        budget.took(100.0 if step % 7 == 3 else 1.2, 1.0)


def test_a_busy_machine_is_soon_forgotten() -> None:
    """When steps took ten times as long for a while, and those with drafts most of all, drafting
    goes on soon after."""
    budget = make_budget(FREE)
    assert len(steps_with_drafts(budget, 100, looking_s=0.2)) == 100
    assert len(steps_with_drafts(budget, 1000, looking_s=40.0, plain_s=9.0)) < 60
    later = steps_with_drafts(budget, 2000, looking_s=0.2, plain_s=0.1)
    assert len(later) > 1400
    assert later[-100:] == list(range(1900, 2000))


def test_a_long_forward_with_a_prompt_is_no_reason_to_pause() -> None:
    """What a chunk of a prompt takes is not the price of drafting."""
    budget = make_budget(FREE)
    for _ in range(100):
        assert budget.wants_drafts(1)
        budget.trim([make_tree([0.5])], 40)
        budget.took(50.0, 49.8)


def test_looking_pauses_beside_prompts_too() -> None:
    """Where prompts come all the time, what is done beside the forward is the price."""
    budget = make_budget(FREE)
    num_looks = 0
    for _ in range(1000):
        is_looking = budget.wants_drafts(1)
        num_looks += is_looking
        budget.trim([make_tree([0.5] if is_looking else [])], 40)
        budget.took(50.0 + 0.8 * is_looking, 50.0)
    assert num_looks < 50


def test_drafts_share_what_a_step_takes_anyway() -> None:
    """The more a step takes beside its forward, the more rows pay."""
    cost, kept = ForwardCost({1: 1.0, 2: 1.6}), []
    for looking_s in (0.0, 1.0):
        budget = make_budget(cost)
        steps_with_drafts(budget, 20, looking_s, plain_s=looking_s)
        tree = make_tree([0.5])
        budget.trim([tree])
        kept.append(tree.num_draft_tokens)
    assert kept == [0, 1]


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


@pytest.mark.parametrize(("share", "is_affordable"), [(0.0, True), (0.05, True), (0.08, False)])
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
            DraftBudget(cost).trim(trees, num_columns=num_trees * num_columns)
            kept.append(sum(tree.num_draft_tokens for tree in trees))
        assert kept == [num_trees, num_trees, num_trees, 0]


def test_a_long_context_is_no_reason_to_pause() -> None:
    """What forwards take longer there is not the price of drafting."""
    cost = BatchCost({1: FREE}, column_cost=ForwardCost({1: 0.01, 2: 0.01}))
    budget = DraftBudget(cost)
    for _ in range(100):
        assert budget.wants_drafts(1)
        budget.trim([make_tree([0.5])], num_columns=500)
        budget.took(6.1, 6.0)


def test_another_cost_changes_the_choice() -> None:
    """After a change of the cost, trees are cut by the new one."""
    budget = make_budget(FREE)
    for num_kept in (3, 0):
        tree = DraftTree(1, 3)
        tree.add_path([2, 3, 4], Source.CONTEXT, 0.5)
        budget.trim([tree])
        assert tree.num_draft_tokens == num_kept
        budget.change_cost(BatchCost({1: LINEAR}))
