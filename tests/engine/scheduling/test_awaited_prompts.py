"""Prompts that begin alike and come together compute their beginning once."""

from __future__ import annotations

import random

import pytest

from hdserve.core import (
    DEFAULT_NAMESPACE,
    PromptScores,
    SamplingParams,
    Sequence,
    SpeculationParams,
)
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.engine import Engine
from hdserve.engine.kv_cache.prefix_cache import KeyedTokens, PrefixCache
from hdserve.engine.scheduling import scheduler
from hdserve.engine.scheduling.prefill_pace import PrefillPace
from hdserve.engine.scheduling.scheduler import Scheduler
from tests.drafters import OracleDrafter
from tests.engine.caches import make_cache
from tests.engine.counted_tokens import CountedTokens
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import make_model

ALIKE = 96


@pytest.fixture(autouse=True)
def few_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tiny models have room for few tokens."""
    monkeypatch.setattr(scheduler, "MIN_AWAITED_TOKENS", 64)


def make_prompts(number: int, num_alike: int = ALIKE, num_own: int = 20) -> list[list[int]]:
    beginning = make_prompt(num_alike)
    return [[*beginning, *make_prompt(num_own, 1 + seed)] for seed in range(number)]


def add(engine: Engine, prompts: list[list[int]], **params: int) -> list[Sequence]:
    sequences = [
        make_sequence(str(number), prompt, **params) for number, prompt in enumerate(prompts)
    ]
    for seq in sequences:
        engine.add(seq)
    return sequences


def make_scheduler(prefixes: PrefixCache) -> Scheduler:
    return Scheduler(
        prefixes,
        max_num_sequences=8,
        pace=PrefillPace(32, None),
        max_draft_tokens=8,
        max_scored_tokens=8,
        shapes=Shapes(),
    )


@pytest.mark.parametrize("is_drafting", [False, True])
def test_all_but_the_first_reuse_it(is_drafting: bool) -> None:
    """And answer as they would by themselves."""
    model, prompts = make_model(), make_prompts(4)
    named = [make_sequence(str(number), each) for number, each in enumerate(prompts)]
    wanted = plain_tokens(model, named)
    drafters = [OracleDrafter(wanted, length=2)] if is_drafting else []
    engine = make_engine(drafters, model=model, prefill_chunk_tokens=32)
    sequences = add(engine, prompts)
    run(engine, [])
    assert [seq.num_reused_tokens for seq in sequences] == [0, ALIKE, ALIKE, ALIKE]
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted


def test_prompts_are_not_read_again_for_each_that_begins_alike() -> None:
    """Each begins with what is there already, so none waits for any other."""
    prefixes = PrefixCache(make_cache(num_rows=2**15))
    many = make_scheduler(prefixes)
    before, *prompts = make_prompts(9, num_own=2000)
    placed = prefixes.place(KeyedTokens.of(before, DEFAULT_NAMESPACE), len(before))
    assert placed is not None
    prefixes.release(placed[0], before, DEFAULT_NAMESPACE)
    counted = [CountedTokens(prompt) for prompt in prompts]
    for number, prompt in enumerate(counted):
        seq = Sequence(str(number), prompt, SamplingParams(), max_total_tokens=len(prompt) + 8)
        many.add(seq)
    assert len(many.admit()) == len(prompts)
    assert [slot.seq.num_cached_tokens for slot in many.running] == [ALIKE] * len(prompts)
    num_tokens = sum(map(len, prompts))
    assert num_tokens <= sum(prompt.num_read for prompt in counted) < 2 * num_tokens


def test_a_prompt_that_was_read_for_another_choice_is_not_read_again() -> None:
    """Neither when it is looked up nor when it is offered."""
    many, prompt = make_scheduler(PrefixCache(make_cache(num_rows=2**15))), make_prompt(2000)
    keyed = KeyedTokens.of(prompt, DEFAULT_NAMESPACE)
    counted = [CountedTokens(prompt) for _ in range(3)]
    for number, own in enumerate(counted):
        seq = Sequence(str(number), own, SamplingParams(), keyed_prompt=keyed)
        seq.max_total_tokens = len(prompt) + 8
        many.add(seq)
        many.admit()
        many.running[-1].seq.num_cached_tokens = len(prompt) - 1
        many.offer(many.running[-1])
    assert [own.num_read for own in counted] == [0] * 3


def make_choices(prompt: list[int], number: int) -> list[Sequence]:
    scores = PromptScores()
    return [
        Sequence(
            str(index),
            list(prompt),
            SamplingParams(max_tokens=4, temperature=1.0, seed=3),
            choice_index=index,
            prompt_scores=scores,
        )
        for index in range(number)
    ]


@pytest.mark.parametrize("chunk_tokens", [39, 64])
def test_choices_begin_together_once_their_prompt_is_cached(chunk_tokens: int) -> None:
    """Also if all but its last token, which each of them computes, was cached before that."""
    model, prompt = make_model(), make_prompt(40)
    choices = make_choices(prompt, 5)
    wanted = plain_tokens(model, choices)
    engine = make_engine(model=model, prefill_chunk_tokens=chunk_tokens, prefill_slowdown=None)
    for seq in choices:
        engine.add(seq)
    running = []
    while not running or engine.stats.num_running == 1:
        engine.step()
        running.append(engine.stats.num_running)
    assert running[-1] == 5
    assert len(running) == 1 + -(-len(prompt) // chunk_tokens)
    run(engine, [])
    assert {seq.request_id: seq.token_ids for seq in choices} == wanted
    assert [seq.num_reused_tokens for seq in choices] == [0, 39, 39, 39, 39]


def test_a_step_admits_no_more_once_so_many_tokens_are_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copying them would hold up those that run."""
    monkeypatch.setattr(scheduler, "_MAX_REUSED_TOKENS", 2 * ALIKE)
    engine = make_engine(prefill_chunk_tokens=32)
    before, *prompts = make_prompts(6)
    run(engine, [make_sequence("before", before)])
    add(engine, prompts)
    running = []
    for _ in range(3):
        engine.step()
        running.append(engine.stats.num_running)
    assert running == [2, 4, 5]


def test_they_wait_for_no_more_than_their_beginning() -> None:
    """The first one's prompt goes on much longer."""
    long, short = make_prompts(2)
    engine = make_engine(prefill_chunk_tokens=32, prefill_slowdown=None)
    sequences = add(engine, [[*long, *make_prompt(110, 9)], short])
    running = []
    for _ in range(4):
        engine.step()
        running.append(engine.stats.num_running)
    assert running == [1, 1, 1, 2]
    assert sequences[0].num_output_tokens == 0
    assert [seq.num_reused_tokens for seq in sequences] == [0, ALIKE]
    run(engine, [])


@pytest.mark.parametrize("reason", ["short", "unshared", "namespace", "scored", "no cache"])
def test_who_would_reuse_nothing_waits_for_nobody(reason: str) -> None:
    prompts = make_prompts(2, num_alike=63 if reason == "short" else ALIKE)
    engine = make_engine(prefill_chunk_tokens=32, prefix_caching=reason != "no cache")
    engine.add(make_sequence("first", prompts[0]))
    params = {"prompt_logprobs": 1} if reason == "scored" else {}
    speculation = SpeculationParams(is_output_shared=reason != "unshared")
    other = make_sequence("other", prompts[1], speculation, **params)
    if reason == "namespace":
        other.namespace = "another"
    engine.add(other)
    engine.step()
    assert engine.stats.num_running == 2


def test_what_is_there_already_is_not_waited_for() -> None:
    """Of a beginning that was computed before, only what the other adds to it would be gained."""
    first, second, third = make_prompts(3)
    engine = make_engine(prefill_chunk_tokens=32)
    run(engine, [make_sequence("before", first)])
    sequences = add(engine, [second, third])
    engine.step()
    assert engine.stats.num_running == 2
    run(engine, [])
    assert [seq.num_reused_tokens for seq in sequences] == [ALIKE, ALIKE]


@pytest.mark.parametrize(("num_slots", "num_running"), [(2, 1), (3, 2)])
def test_who_waits_keeps_a_slot(num_slots: int, num_running: int) -> None:
    """So those behind it do not go first; where there are more slots they need not wait."""
    engine = make_engine(prefill_chunk_tokens=32, max_num_sequences=num_slots)
    sequences = add(engine, [*make_prompts(2), make_prompt(30, 9)])
    engine.step()
    assert engine.stats.num_running == num_running
    assert (sequences[2].admitted_s is None) == (num_slots == 2)
    run(engine, [])
    assert sequences[1].num_reused_tokens == ALIKE


def test_nobody_waits_for_one_that_is_gone() -> None:
    """What it had computed is reused all the same."""
    engine = make_engine(prefill_chunk_tokens=32)
    sequences = add(engine, make_prompts(3))
    engine.step()
    engine.abort("0")
    run(engine, [])
    assert [seq.num_reused_tokens for seq in sequences[1:]] == [32, ALIKE]
    assert all(seq.num_output_tokens for seq in sequences[1:])


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_answers_are_the_same(seed: int) -> None:
    """Many beginnings, few slots, little room: all are answered as by themselves."""
    chance, model = random.Random(seed), make_model()
    prompts = []
    for number in range(16):
        cut, family = chance.choice((64, 80, 128, 160)), chance.randrange(3)
        own = make_prompt(chance.randrange(1, 60), 10 + number)
        prompts.append([*make_prompt(160, family)[:cut], *own])
    named = [make_sequence(str(n), each, max_tokens=8) for n, each in enumerate(prompts)]
    wanted = plain_tokens(model, named)
    engine = make_engine(
        [OracleDrafter(wanted, length=2)] if seed % 2 else [],
        model=model,
        kv_cache_tokens=512 + 128 * (seed % 3),
        max_num_sequences=4,
        prefill_chunk_tokens=16,
    )
    found: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            found[output.sequence.request_id] = output.sequence.token_ids

    for number, prompt in enumerate(prompts):
        engine.add(make_sequence(str(number), prompt, max_tokens=8))
        if chance.random() < 0.2:
            engine.add(make_sequence(f"gone {number}", prompt, max_tokens=8))
        for _ in range(chance.randrange(4)):
            step()
        engine.abort(f"gone {number}")
    while engine.has_work:
        step()
    assert {name: tokens for name, tokens in found.items() if name in wanted} == wanted
    assert engine.stats.num_reused_tokens > 0
    assert engine.stats.kv_cache_usage == 0.0
