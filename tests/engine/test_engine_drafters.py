"""What an engine tells its drafters, and what it spends on them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Any, SupportsIndex

import numpy as np
import pytest
import torch

from hdserve import core
from hdserve.core import FinishReason, SpeculationParams
from hdserve.drafting.base import BatchDrafter, Drafter, Forward, Verified
from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.drafting.budget import DraftBudget, StepBudget
from hdserve.tree import Acceptance, DraftTree
from tests.drafters import JunkDrafter, OracleDrafter, SlowLearner
from tests.engine.helpers import GREEDY, RecordingDrafter, plain
from tests.engines import make_engine, make_prompt, make_sequence, run
from tests.models import VOCAB_SIZE, make_model


@pytest.mark.parametrize(
    "options",
    [
        {"max_draft_tokens": 200, "max_model_len": 100},
        {"max_draft_tokens": 16, "max_model_len": 4},
        {"max_draft_tokens": 12, "kv_cache_tokens": 32},
        {"max_draft_tokens": 1},
    ],
)
def test_the_budget_is_measured_in_any_configuration(options: dict[str, Any]) -> None:
    """Trees wider than the context or the cache are measured all the same, and still lossless."""
    drafters = [JunkDrafter(VOCAB_SIZE)]
    engine = make_engine(drafters, adapts_budget=True, **options)
    seq = make_sequence("a", make_prompt(3), **GREEDY, max_tokens=8)
    run(engine, [seq])
    wanted = plain(make_prompt(3), **GREEDY, max_tokens=8).token_ids
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.token_ids == wanted[: options.get("max_model_len", len(wanted))]
    assert engine.stats.kv_cache_usage == 0.0


class IndexOnly:
    """An integer as far as Python needs one, and no more."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize("most", [np.uint8(2), IndexOnly()])
def test_bounds_of_requests_are_numbers(most: SupportsIndex) -> None:
    """Whatever integer a request names, drafters are given Python's, which kernels were compiled
    for, and nobody's request ends."""
    drafter = RecordingDrafter({name: make_prompt(40) for name in "ab"})
    speculation = SpeculationParams(max_draft_tokens=most)  # type: ignore[arg-type]
    sequences = [
        make_sequence("a", make_prompt(5), speculation, max_tokens=4),
        make_sequence("b", make_prompt(6), max_tokens=4),
    ]
    run(make_engine([drafter]), sequences)
    assert {type(tree.capacity) for tree, *_ in drafter.observed} == {int}
    assert [seq.num_output_tokens for seq in sequences] == [4, 4]


def test_learning_is_a_part_of_what_drafting_costs() -> None:
    """Drafts that are always right, and are thought about longer than they save, are paused."""
    wanted = plain(make_prompt(3), **GREEDY, max_tokens=200).token_ids
    engine = make_engine([SlowLearner({"a": wanted})], adapts_budget=True)
    seq = make_sequence("a", make_prompt(3), **GREEDY, max_tokens=200)
    run(engine, [seq])
    assert seq.counts.num_accepted_tokens > 0
    assert seq.counts.num_drafts < seq.counts.num_steps / 2


def test_drafters_are_told_the_whole_story() -> None:
    """Per sequence ``start``, then ``propose`` and ``observe`` in turn, then ``finish``; what is
    observed is what was appended, with the forward's own outputs for every node."""
    model = make_model()
    prompt = make_prompt(21)
    future = plain(prompt, temperature=0.8).token_ids
    drafter = RecordingDrafter({"a": future})
    seq = make_sequence("a", prompt, temperature=0.8)
    engine = make_engine([drafter], model=model)
    run(engine, [seq])
    assert engine.stats.num_drafter_failures == {}
    calls = [call for call, _ in drafter.calls]
    assert calls[0] == "start"
    assert calls[-1] == "finish"
    pairs = calls[1:-1]
    if len(pairs) % 2:
        assert pairs.pop(-1) == "observe", "the last step had no room for drafts"
    assert pairs == ["propose", "observe"] * (len(pairs) // 2)
    for tree, acceptance, token_ids, forward in drafter.observed:
        assert token_ids[-len(acceptance.token_ids) :] == list(acceptance.token_ids)
        before = token_ids[: -len(acceptance.token_ids)]
        assert before[-1] == tree.token_ids[0]
        check_forward(model, before, tree, forward)


class TellingDrafter(Drafter):
    """Drafts nothing and keeps what it is told, with the length of the sequence then."""

    name = "telling"

    def __init__(self) -> None:
        self.told: list[tuple[int, DraftTree, Acceptance]] = []
        self.num_started = 0

    def start(self, seq: core.Sequence) -> None:
        self.num_started = len(seq.token_ids)

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        pass

    def observe(
        self, seq: core.Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        self.told.append((len(seq.token_ids), tree, acceptance))


class TogetherDrafter(BatchDrafter):
    """Drafts nothing and keeps what it is told of each step."""

    name = "together"

    def __init__(self) -> None:
        self.told: list[dict[str, int]] = []

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        pass

    def observe_all(self, verified: Collection[Verified]) -> None:
        self.told.append({one.seq.request_id: len(one.acceptance.token_ids) for one in verified})


def test_drafters_are_told_of_a_step_at_once() -> None:
    """Of all its sequences together, as long as there is something to draft for them."""
    drafter = TogetherDrafter()
    lengths = {"a": 2, "b": 4, "c": 4}
    run(
        make_engine([drafter]),
        [
            make_sequence(name, make_prompt(5), **GREEDY, max_tokens=n)
            for name, n in lengths.items()
        ],
    )
    assert drafter.told == [dict.fromkeys("abc", 1)] + [dict.fromkeys("bc", 1)] * 2


class Pauses(DraftBudget):
    """Looks for drafts in every ``period``-th step from ``first`` on, whatever they take."""

    def __init__(self, first: int, period: int) -> None:
        super().__init__(BatchCost({1: ForwardCost({1: 1.0, 64: 1.0})}))
        self._steps = count(-first)
        self._period = period

    def skip_step(self, num_sequences: int) -> bool:
        step = next(self._steps)
        self.change_cost(self._cost)
        return step < 0 or step % self._period != 0


def test_drafters_know_what_need_not_be_proposed() -> None:
    """A tree says from which score on a row pays."""

    class Noting(TellingDrafter):
        def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
            least.append(tree.min_score)

    least: list[float] = []
    engine = make_engine([Noting()])
    engine._drafts.budget = DraftBudget(BatchCost({1: ForwardCost({1: 1.0, 2: 1.25})}))
    run(engine, [make_sequence("a", make_prompt(9), **GREEDY, max_tokens=3)])
    assert least[0] == pytest.approx(0.25)


class Boaster(JunkDrafter):
    """Is certain of what never comes."""

    name = "boaster"

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        super().propose(seq, tree)
        tree.scores[1:] = [1.0] * tree.num_draft_tokens
        tree.sources[1:] = [core.Source.STATISTICS] * tree.num_draft_tokens


@pytest.mark.parametrize("is_boaster_first", [True, False])
def test_the_engine_believes_those_that_were_right(is_boaster_first: bool) -> None:
    """Of two drafters that each fill a tree, the one that is right has the room in the end, though
    the other promises more."""
    wanted = plain(make_prompt(3), **GREEDY, max_tokens=300).token_ids
    drafters: list[Drafter] = [OracleDrafter({"a": wanted}, 8), Boaster(VOCAB_SIZE)]
    engine = make_engine(drafters[::-1] if is_boaster_first else drafters)
    engine._drafts.budget = DraftBudget(BatchCost({1: ForwardCost({1: 1.0, 64: 1.0})}))
    seq = make_sequence("a", make_prompt(3), **GREEDY, max_tokens=300)
    run(engine, [seq])
    assert seq.token_ids == wanted
    assert seq.counts.num_accepted_tokens > 200


@pytest.mark.parametrize(("first", "period"), [(0, 1), (0, 7), (5, 1), (5, 7), (40, 1)])
def test_drafters_are_told_of_plain_steps_when_drafts_are_wanted(first: int, period: int) -> None:
    """At the start what there is then, later several tokens at once, each once and in order, as a
    path that was accepted."""
    drafter = TellingDrafter()
    seq = make_sequence("a", make_prompt(9), **GREEDY, max_tokens=40)
    engine = make_engine([drafter])
    engine._drafts.budget = Pauses(first, period)
    run(engine, [seq])
    if first >= 40:
        assert not drafter.told
        assert drafter.num_started == 0
        return
    assert drafter.num_started == 9 + first
    text = seq.token_ids[: drafter.num_started]
    for num_tokens_then, tree, acceptance in drafter.told:
        assert tree.token_ids == [text[-1], *acceptance.token_ids[:-1]]
        assert list(acceptance.path) == list(range(len(tree)))
        assert set(tree.sources) == {core.Source.PLAIN}
        text += acceptance.token_ids
        assert len(text) == num_tokens_then
    assert text == seq.token_ids[: len(text)]
    assert len(seq.token_ids) - len(text) <= period


class Tries(Pauses):
    """Wants drafts in every step, to see whether they pay."""

    def __init__(self) -> None:
        super().__init__(first=0, period=1)

    def begin_step(
        self, num_sequences: int, num_other_rows: int = 0, num_columns: int = 0
    ) -> StepBudget:
        step = super().begin_step(num_sequences, num_other_rows, num_columns)
        step.is_probe = True
        return step


@pytest.mark.parametrize(
    ("num_expected", "is_probe", "most"), [(0, False, 35), (200, False, 35), (0, True, 3)]
)
def test_drafters_begin_with_few_texts_in_a_step(
    num_expected: int, is_probe: bool, most: int
) -> None:
    """After a pause others go on meanwhile; all have begun some steps later.  What a request
    expects is text, too.  Where drafts did not pay, very few begin."""

    class Starting(TellingDrafter):
        def start(self, seq: core.Sequence) -> None:
            starts[-1] += 1

    starts: list[int] = []
    engine = make_engine(
        [Starting()], max_num_sequences=40, kv_cache_tokens=16384, prefill_chunk_tokens=16384
    )
    speculation = SpeculationParams(prediction=(3,) * num_expected)
    prompt = make_prompt(240 - num_expected)
    for number in range(40):
        engine.add(make_sequence(str(number), prompt, speculation, **GREEDY, max_tokens=16))
    if is_probe:
        engine._drafts.budget = Tries()
    while engine.stats.num_running + engine.stats.num_waiting:
        starts.append(0)
        engine.step()
    assert (max(starts), sum(starts)) == (most, 40)


def test_requests_without_drafts_are_no_business_of_drafters() -> None:
    drafter = TellingDrafter()
    speculation = SpeculationParams(is_enabled=False)
    seq = make_sequence("a", make_prompt(9), speculation, **GREEDY, max_tokens=8)
    run(make_engine([drafter]), [seq])
    assert (drafter.num_started, drafter.told) == (0, [])


class Counting(DraftBudget):
    """Counts the steps from which it learns whether drafts pay."""

    num_steps = 0

    def begin_step(
        self, num_sequences: int, num_other_rows: int = 0, num_columns: int = 0
    ) -> StepBudget:
        self.num_steps += 1
        return super().begin_step(num_sequences, num_other_rows, num_columns)


@pytest.mark.parametrize(
    ("speculation", "max_tokens"),
    [
        (SpeculationParams(is_enabled=False), 8),
        (SpeculationParams(max_draft_tokens=0), 8),
        (SpeculationParams(), 1),
    ],
)
def test_requests_without_drafts_do_not_tell_whether_drafts_pay(
    speculation: SpeculationParams, max_tokens: int
) -> None:
    """Otherwise those after them would have none for hundreds of steps."""
    engine = make_engine([OracleDrafter({"b": make_prompt(40)})])
    budget = engine._drafts.budget = Counting(BatchCost({1: ForwardCost({1: 1.0, 64: 1.0})}))
    prompt = make_prompt(9)
    run(engine, [make_sequence("a", prompt, speculation, **GREEDY, max_tokens=max_tokens)])
    assert budget.num_steps == 0
    beside = make_sequence("c", prompt, speculation, **GREEDY, max_tokens=max_tokens)
    run(engine, [make_sequence("b", prompt, **GREEDY, max_tokens=8), beside])
    assert budget.num_steps > 0


def check_forward(
    model: torch.nn.Module, before: list[int], tree: DraftTree, forward: Forward
) -> None:
    """The forward's outputs at every node are those of the stock model on the node's own path."""
    name = model.config._attn_implementation
    model.set_attn_implementation("eager")
    tokens, logits = forward.top_tokens(3)
    assert tokens.shape == logits.shape == (len(tree), 3)
    for node in range(len(tree)):
        path = [tree.token_ids[step] for step in tree.path_to(node)[1:]]
        with torch.no_grad():
            output = model(torch.tensor([before + path]), output_hidden_states=True)
        wanted = output.logits[0, -1].float().topk(3)
        assert tokens[node].tolist() == wanted.indices.tolist()
        assert logits[node].tolist() == pytest.approx(wanted.values.tolist(), abs=1e-4)
        hidden = output.hidden_states[-1][0, -1]
        torch.testing.assert_close(forward.hidden(node), hidden, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation(name)
