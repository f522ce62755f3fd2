"""When drafts are looked for, by what steps take that are told: the choice is tested, never the
time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.drafting.budget import DraftBudget
from hdserve.drafting.draft_backoff import DraftBackoff
from tests.drafting.budgets import FREE, make_budget, make_tree, next_look, trim


def steps_with_drafts(
    budget: DraftBudget,
    num_steps: int,
    looking_s: float,
    *,
    plain_s: float = 0.0,
    catching_up_s: float = 0.0,
    first_look_s: float = 0.0,
    settling_s: float = 0.0,
    scores: Sequence[Sequence[float]] = ((0.5,),),
    skips: bool = True,
) -> list[int]:
    """In which of ``num_steps`` steps of one sequence, with forwards of a second, drafts are looked
    for.

    Args:
        looking_s, plain_s: what a step takes beside its forward, with drafts and without.
        catching_up_s: of a step with drafts.
        first_look_s: what a look after a pause takes more.
        settling_s: what each of the first eight steps after a look takes more.
        scores: what looks find, one after the other and then again.
        skips: whether the budget is first asked if there is anything to do, as in the engine.
    """
    found: list[int] = []
    for number in range(num_steps):
        if skips and budget.skip_step(1):
            continue
        step = budget.begin_step(1)
        if step.is_look:
            more_s = 0.0 if found and found[-1] == number - 1 else first_look_s
            step.trim([make_tree(list(scores[len(found) % len(scores)]))])
            step.took(1.0 + looking_s + more_s, 1.0, catching_up_s)
            found.append(number)
        else:
            is_settling = bool(found) and number - found[-1] <= 8
            step.took(1.0 + plain_s + settling_s * is_settling, 1.0)
    return found


def test_looking_for_drafts_pauses_where_it_does_not_pay() -> None:
    """Not at all while it pays, else longer and longer, but never for ever; each number of
    sequences by itself."""
    budget = make_budget(FREE)
    assert steps_with_drafts(budget, 100, looking_s=0.4) == list(range(100))
    looked = steps_with_drafts(budget, 2000, looking_s=0.6)
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(looked)]
    compared, first = [index for index, pause in enumerate(pauses) if pause][:2]
    assert pauses[compared] == 12, "what plain steps take is found out first"
    assert pauses[first : first + 7] == [1, 2, 4, 8, 16, 20, 20]
    assert first > compared + 1, "one step proves nothing"
    assert all(budget.begin_step(2).is_look for _ in range(10))


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


def test_of_a_pause_only_the_ends_are_timed() -> None:
    """Looks come when they would if all steps were; those in between are skipped."""
    budget, timed = make_budget(FREE), make_budget(FREE)
    expected = steps_with_drafts(timed, 3000, looking_s=2.0, skips=False)
    looked, asked = list[int](), list[int]()
    for number in range(3000):
        if budget.skip_step(1):
            continue
        step = budget.begin_step(1)
        (looked if step.is_look else asked).append(number)
        if step.is_look:
            step.trim([make_tree([0.5])])
        step.took(3.0 if step.is_look else 1.0, 1.0)
    assert looked == expected
    pauses = [range(first + 1, last) for first, last in itertools.pairwise(looked)]
    wanted = [step for pause in pauses for step in sorted({*pause[:8], *pause[-9:]})]
    assert [step for step in asked if step < looked[-1]] == wanted
    assert max(len(pause) for pause in pauses) > 100


@pytest.mark.parametrize("looking_s", [0.4, 0.6, 1.5])
@pytest.mark.parametrize("settling_s", [0.0, 0.3])
def test_resting_in_the_middle_of_a_pause_changes_nothing(
    looking_s: float, settling_s: float
) -> None:
    """It is a shorter way to the same: steps that would look for nothing, timed by nobody."""
    looked = [
        steps_with_drafts(
            make_budget(FREE),
            3000,
            looking_s,
            settling_s=settling_s,
            scores=[(0.5,), (0.9, 0.8), (0.1,)],
            skips=skips,
        )
        for skips in (False, True)
    ]
    assert looked[0] == looked[1]
    budget = make_budget(FREE)
    steps_with_drafts(budget, 2000, looking_s=1.5)
    assert sum(budget.skip_step(1) for _ in range(20)) > 0


def test_what_drafters_catch_up_with_is_part_of_a_look() -> None:
    """Where they begin with many sequences at the end of a pause, pauses are longer; what they
    begin with while drafts pay is no reason to pause."""
    budget = make_budget(FREE)
    assert steps_with_drafts(budget, 100, looking_s=0.4, catching_up_s=5.0) == list(range(100))
    looked = steps_with_drafts(budget, 2000, looking_s=0.6, catching_up_s=0.3)
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(looked)]
    assert pauses[-3:] == [80, 80, 80], "(0.1 + 0.3) / 0.005"


def test_what_plain_steps_take_more_after_a_look_is_part_of_it() -> None:
    """It leaves the processor's caches to other data."""
    budget = make_budget(FREE)
    looked = steps_with_drafts(budget, 2000, looking_s=0.6, settling_s=0.05)
    pauses = [later - earlier - 1 for earlier, later in itertools.pairwise(looked)]
    assert pauses[-3:] == [100, 100, 100], "(0.1 + 8 * 0.05) / 0.005"


def test_a_pause_ends_when_drafts_pay() -> None:
    """It is tried again, and goes on when it pays by then."""
    budget = make_budget(FREE)
    steps_with_drafts(budget, 1000, looking_s=0.6)
    looked = steps_with_drafts(budget, 2000, looking_s=0.0)
    assert looked[-100:] == list(range(1900, 2000))


def test_a_look_that_gains_is_followed_by_another() -> None:
    """It may have been at a part of the sequences, as looks are that lose."""
    budget = make_budget(FREE)
    assert not budget.begin_step(1).is_probe
    steps_with_drafts(budget, 1000, looking_s=0.6)
    assert not budget.begin_step(2).is_probe
    looks: list[tuple[int, bool]] = []
    for number in range(100):
        step = budget.begin_step(1)
        if step.is_look:
            step.trim([make_tree([0.5])])
            looks.append((number, step.is_probe))
        step.took(1.0, 1.0)
    (_, loses), (gaining, gains), (following, follows) = looks[:3]
    assert (loses, gains, follows) == (True, True, False), "one was needed to find out"
    assert following == gaining + 1


def test_that_the_first_steps_take_long_is_no_reason_to_pause() -> None:
    """Everything does that is done for the first time."""
    budget = make_budget(FREE)
    assert steps_with_drafts(budget, 4, looking_s=5.0) == [0, 1, 2, 3]
    assert steps_with_drafts(budget, 100, looking_s=0.4) == list(range(100))


def test_finding_nothing_is_no_reason_to_pause_if_it_is_quick() -> None:
    """Time, not luck, decides: drafts that may come later are not missed."""
    budget = make_budget(FREE)
    for _ in range(50):
        trim(budget, [make_tree([])]).took(1.0, 1.0)


def test_a_plain_step_is_what_it_takes_among_others() -> None:
    """The first ones after steps with drafts take longer, which is no reason to look for drafts."""
    backoff = DraftBackoff(1.0, 1)
    for gain_s in [*[1.0] * 40, -1.0]:
        assert backoff.begin_step()
        backoff.took(3.0, catching_up_s=0.0, beside_prompts=False)
        backoff.weigh(gain_s, as_plain_s=1.0)
    for seconds in (1.65, 1.34, 1.26, 1.15, 1.0, 0.95, 0.9, 0.8, 0.75, 0.76, 0.77, 0.76):
        assert not backoff.begin_step()
        backoff.took(seconds, catching_up_s=0.0, beside_prompts=False)
    assert backoff.begin_step()
    assert backoff.beside_forward_s() == (3.0, 0.76)


def test_what_plain_steps_take_is_no_loss() -> None:
    """A step that is long with drafts and without them is no reason to pause, but for the few steps
    in which it is found out, now and then, that it is long without them, too."""
    budget = make_budget(FREE)
    looked = steps_with_drafts(budget, 2000, looking_s=2.2, plain_s=2.0)
    assert len(looked) >= 2000 - 12 * (2000 // 256 + 1)


def test_rare_large_gains_outweigh_frequent_losses() -> None:
    """Most looks find nothing, but what the others find is worth more than all of them take."""
    budget = make_budget(FREE)
    rare = [(), (), (), (0.95, 0.9, 0.9, 0.9)]
    looked = steps_with_drafts(budget, 2000, looking_s=0.6, scores=rare)
    assert len(looked) > 1900


def test_losses_of_long_looks_outweigh_smaller_gains() -> None:
    """A look that finds much takes long, and loses more than half a plain step where it finds a
    little less: it lost 0.85 steps here for each 0.8 that the next one gained."""
    budget = make_budget(FREE)
    scores = [(0.95, 0.95, 0.35), (0.95, 0.95, 0.95, 0.95, 0.1)]
    looked = steps_with_drafts(budget, 4000, looking_s=3.1, scores=scores)
    assert len(looked) < 1000
    looked = steps_with_drafts(make_budget(FREE), 4000, looking_s=3.0, scores=scores)
    assert len(looked) > 3500


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
        trim(budget, [make_tree([0.5])]).took(100.0 if step % 7 == 3 else 1.2, 1.0)


def test_a_busy_machine_is_soon_forgotten() -> None:
    """When steps took ten times as long for a while, and those with drafts most of all, drafting
    goes on soon after."""
    budget = make_budget(FREE)
    assert len(steps_with_drafts(budget, 100, looking_s=0.2)) == 100
    assert len(steps_with_drafts(budget, 1000, looking_s=40.0, plain_s=9.0)) < 60
    later = steps_with_drafts(budget, 2000, looking_s=0.2, plain_s=0.1)
    assert len(later) > 1400
    assert later[-100:] == list(range(1900, 2000))


def test_the_longest_pause_is_one_of_steps_or_of_time() -> None:
    """A look that loses three steps, whatever a step takes: pauses of slow models have few steps,
    those of fast ones as many as make up for it, but no more than half a second."""
    longest: list[int] = []
    for step_s in (1.0, 0.001, 0.0005):
        budget, looked = make_budget(ForwardCost({1: step_s, 2: 2 * step_s})), list[int]()
        for number in range(5000):
            step = budget.begin_step(1)
            if step.is_look:
                looked.append(number)
                step.trim([make_tree([0.1])])
            step.took((4.0 if step.is_look else 1.0) * step_s, step_s)
        longest.append(max(later - earlier - 1 for earlier, later in itertools.pairwise(looked)))
    assert longest == [256, 500, 600]


def test_a_long_forward_with_a_prompt_is_no_reason_to_pause() -> None:
    """What a chunk of a prompt takes is not the price of drafting."""
    budget = make_budget(FREE)
    for _ in range(100):
        trim(budget, [make_tree([0.5])], 40).took(50.0, 49.8)


def test_looking_pauses_beside_prompts_too() -> None:
    """Where prompts come all the time, what is done beside the forward is the price."""
    budget = make_budget(FREE)
    num_looks = 0
    for _ in range(1000):
        step = budget.begin_step(1, 40)
        if step.is_look:
            step.trim([make_tree([0.5])])
        step.took(50.0 + 0.8 * step.is_look, 50.0)
        num_looks += step.is_look
    assert num_looks < 50


def test_drafts_share_what_a_step_takes_anyway() -> None:
    """The more a step takes beside its forward, the more rows pay."""
    cost, kept = ForwardCost({1: 1.0, 2: 1.6}), []
    for looking_s in (0.0, 1.0):
        budget = make_budget(cost)
        steps_with_drafts(budget, 20, looking_s, plain_s=looking_s)
        tree = make_tree([0.5])
        next_look(budget, 1).trim([tree])
        kept.append(tree.num_draft_tokens)
    assert kept == [0, 1]


def test_a_long_context_is_no_reason_to_pause() -> None:
    """What forwards take longer there is not the price of drafting."""
    cost = BatchCost({1: FREE}, column_cost=ForwardCost({1: 0.01, 2: 0.01}))
    budget = DraftBudget(cost)
    for _ in range(100):
        trim(budget, [make_tree([0.5])], num_columns=500).took(6.1, 6.0)


def test_what_looks_took_on_a_busy_machine_is_soon_forgotten() -> None:
    """However long they took, a loss counts only up to a part of a step."""
    budget = make_budget(FREE)
    steps_with_drafts(budget, 200, looking_s=0.2)
    steps_with_drafts(budget, 30, looking_s=500.0)
    assert len(steps_with_drafts(budget, 1000, looking_s=0.2)) > 980
