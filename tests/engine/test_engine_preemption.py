"""Sequences that outgrow the cache wait for room; their answers are what they would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdserve import core
from hdserve.core import FinishReason, PromptScores, Source, SpeculationParams
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.engine.engine import Engine
from hdserve.engine.scheduling.scheduler import GROWTH_TOKENS
from tests.drafters import OracleDrafter, only
from tests.engine.helpers import GREEDY
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import VOCAB_SIZE, make_model

NUM_OUTPUT = 360
NUM_ROWS = 1024

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"temperature": 1.0, "seed": 5},
    "penalties": {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.1},
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(max_position_embeddings=NUM_ROWS)


def make(model: torch.nn.Module, drafters: tuple[Drafter, ...] = (), **options: Any) -> Engine:
    return make_engine(
        drafters, **{"model": model, "kv_cache_tokens": NUM_ROWS, "max_num_sequences": 8, **options}
    )


def make_sequences(**params: Any) -> list[core.Sequence]:
    options = {"max_tokens": NUM_OUTPUT, **GREEDY, **params}
    return [make_sequence(str(n), make_prompt(30 + n, n), **options) for n in range(3)]


@pytest.mark.parametrize(
    ("name", "is_drafting"),
    [
        ("greedy", False),
        ("sampled", True),
        ("penalties", True),
        pytest.param("greedy", True, marks=pytest.mark.slow),
        pytest.param("sampled", False, marks=pytest.mark.slow),
        pytest.param("penalties", False, marks=pytest.mark.slow),
    ],
)
def test_answers_are_what_they_are_alone(
    model: torch.nn.Module, name: str, is_drafting: bool
) -> None:
    """Of three that would fill the cache twice, one has to wait, and is not told apart."""
    sequences = make_sequences(**PARAMS[name])
    wanted = plain_tokens(model, sequences)
    drafters = (OracleDrafter(wanted),) if is_drafting else ()
    engine = make(model, drafters, prefix_caching=not is_drafting)
    outputs = run(engine, sequences)
    assert engine.stats.num_preemptions > 0
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    for seq in sequences:
        told = [t for out in outputs if out.sequence is seq for t in out.token_ids]
        assert told == seq.output_token_ids
    assert engine.stats.num_finished == {FinishReason.LENGTH: 3}
    assert engine.stats.kv_cache_usage == 0.0


def test_drafters_go_on_where_they_were(model: torch.nn.Module) -> None:
    """What they keep of a sequence stays while it waits."""
    sequences = make_sequences()
    wanted = plain_tokens(model, sequences)
    engine = make(model, (Hierarchy(DraftResources(VOCAB_SIZE), only("context")),))
    run(engine, sequences)
    assert engine.stats.num_preemptions > 0
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert engine.stats.num_drafter_sequences == 0
    assert engine.stats.num_drafter_failures == {}
    assert engine.stats.drafts.accepted_by_source[Source.CONTEXT] > 0


def test_tokens_are_counted_once(model: torch.nn.Module) -> None:
    """Of the prompt, however often they are computed; and what was found is what was found when the
    request came."""
    sequences = make_sequences()
    engine = make(model)
    run(engine, sequences)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prompt_tokens == sum(seq.num_prompt_tokens for seq in sequences)
    assert engine.stats.num_queried_tokens == engine.stats.num_prompt_tokens
    assert engine.stats.num_output_tokens == 3 * NUM_OUTPUT
    assert [seq.num_reused_tokens for seq in sequences] == [0, 0, 0]


def run_until_one_waits(engine: Engine, sequences: list[core.Sequence]) -> core.Sequence:
    """The one that was preempted."""
    for seq in sequences:
        engine.add(seq)
    while not engine.stats.num_preemptions:
        engine.step()
    (waiting,) = (seq for seq in sequences if seq.num_cached_tokens == 0)
    assert waiting.num_output_tokens > GROWTH_TOKENS // 2
    return waiting


def test_one_that_waits_can_be_aborted(model: torch.nn.Module) -> None:
    """Nothing of it stays."""
    sequences = make_sequences()
    engine = make(model, (Hierarchy(DraftResources(VOCAB_SIZE), only("context")),))
    waiting = run_until_one_waits(engine, sequences)
    engine.abort(waiting.request_id)
    assert waiting.finish_reason is FinishReason.ABORT
    assert engine.stats.num_drafter_sequences == 2
    run(engine, [])
    assert engine.stats.num_drafter_sequences == 0
    assert engine.stats.num_finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 2}


def test_one_that_waits_outlives_a_step_that_fails(model: torch.nn.Module) -> None:
    """Those that run end with an error; it has lost nothing but what it can compute again."""
    sequences = make_sequences()
    wanted = plain_tokens(model, sequences)

    class Interrupting(OracleDrafter):
        is_armed = False

        def propose(self, seq: core.Sequence, tree: Any) -> None:
            if self.is_armed:
                raise KeyboardInterrupt
            super().propose(seq, tree)

    drafter = Interrupting(wanted)
    engine = make(model, (drafter,))
    waiting = run_until_one_waits(engine, sequences)
    drafter.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    drafter.is_armed = False
    run(engine, [])
    assert waiting.finish_reason is FinishReason.LENGTH
    assert waiting.token_ids == wanted[waiting.request_id]
    assert engine.stats.num_finished == {FinishReason.ERROR: 2, FinishReason.LENGTH: 1}


def test_what_waits_is_found_by_nobody_else(model: torch.nn.Module) -> None:
    """A private sequence leaves nothing while it waits, and its answer is as it would be."""
    sequences = make_sequences()
    wanted = plain_tokens(model, sequences)
    for seq in sequences:
        seq.speculation = SpeculationParams(is_output_shared=False)
    engine = make(model)
    waiting = run_until_one_waits(engine, sequences)
    copied = make_sequence("copy", waiting.token_ids, max_tokens=4, **GREEDY)
    run(engine, [copied])
    assert copied.num_reused_tokens == 0
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted


def test_choices_of_one_prompt(model: torch.nn.Module) -> None:
    """They share a prompt, and its log probabilities, and outgrow the cache like any others."""
    prompt, scores = make_prompt(40), PromptScores()
    sequences = [
        core.Sequence(
            str(number),
            list(prompt),
            core.SamplingParams(max_tokens=NUM_OUTPUT, temperature=1.0, seed=3, prompt_logprobs=0),
            choice_index=number,
            prompt_scores=scores,
        )
        for number in range(5)
    ]
    wanted = plain_tokens(model, sequences)
    engine = make(model)
    outputs = run(engine, sequences)
    assert engine.stats.num_preemptions > 0
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert scores.found is not None
    scored = [out for out in outputs if out.prompt_logprobs is not None]
    assert {len(out.prompt_logprobs or ()) for out in scored} == {len(prompt)}


def test_short_answers_run_together_whatever_they_might_have_become(
    model: torch.nn.Module,
) -> None:
    """Requests that do not say how long their answer may be take what they need."""
    params = {"max_tokens": None, "stop_token_ids": tuple(range(VOCAB_SIZE)), **GREEDY}
    engine = make(model)
    for number in range(3):
        engine.add(make_sequence(str(number), make_prompt(20, number), **params))
    engine.step()
    assert engine.stats.num_waiting == 0
    run(engine, [])
    assert engine.stats.num_preemptions == 0
