"""Penalties, biases and ``min_tokens`` are what their definitions say."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hdserve.core import SamplingParams, Sequence
from hdserve.engine.sampling.allowed_tokens import AllowedTokens
from hdserve.engine.sampling.logits_processor import LogitsProcessor, seen_tokens
from hdserve.engine.sampling.sampler import choose_checked
from tests.engine.counted_tokens import CountedTokens
from tests.engine.sampling.test_sampler import CPU, random_logits
from tests.engines import make_engine, make_prompt, run


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_beyond_all_numbers_leaves_the_likeliest(temperature: float) -> None:
    """Seen tokens, here, of which one is chosen as they are all as likely."""
    params = SamplingParams(temperature=temperature, repetition_penalty=Fraction(1, 10**39))  # type: ignore[arg-type]
    logits = random_logits(1, 61)
    seen = logits[0].topk(5).indices.tolist()
    processor = LogitsProcessor(params, seen_tokens(params, seen), (), 61, CPU)
    shaped = processor.apply(logits)
    chosen = {choose_checked(logits, shaped, params, key) for key in range(50)}
    assert chosen <= {(token, True) for token in seen}
    assert len(chosen) > 1 or temperature == 0.0


HISTORIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": -0.6},
    "bias": {"logit_bias": {0: -100.0, 4: 7.5}},
    "bias of integers": {"logit_bias": {0: -100, 4: 7}},
    "min_tokens": {"min_tokens": 3},
    "allowed": {"allowed_token_ids": (9, 2, 3)},
    "allowed and biased": {"allowed_token_ids": (2, 4), "logit_bias": {4: 7.5, 5: 100.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.0},
        "min_tokens": 2,
    },
}


@pytest.mark.parametrize("name", HISTORIES)
def test_logits_processors_equal_their_definitions(name: str) -> None:
    """Penalties, biases and ``min_tokens`` are what their definitions say, token by token, while
    the output grows."""
    params, vocab_size = SamplingParams(**HISTORIES[name]), 11
    prompt, output, ending = [1, 1, 5], [3, 3, 5, 9], {6, 3}
    ids = params.allowed_token_ids
    allowed = AllowedTokens(ids, vocab_size) if ids else None
    seen = seen_tokens(params, prompt)
    processor = LogitsProcessor(params, seen, ending, vocab_size, CPU, allowed)
    for num_output in range(len(output) + 1):
        so_far = output[:num_output]
        logits = random_logits(1, vocab_size, seed=num_output)
        wanted = []
        for token in range(vocab_size):
            value = float(logits[0, token])
            if token in prompt + so_far:
                factor = params.repetition_penalty
                value = value / factor if value > 0 else value * factor
            value -= params.frequency_penalty * so_far.count(token)
            value -= params.presence_penalty * (token in so_far)
            value += params.logit_bias.get(token, 0.0)
            if params.allowed_token_ids and token not in params.allowed_token_ids:
                value = -math.inf
            if num_output < params.min_tokens and token in ending:
                value = -math.inf
            wanted.append(value)
        before = logits.clone()
        torch.testing.assert_close(processor.apply(logits)[0], torch.tensor(wanted))
        assert torch.equal(logits, before), "the model's logits are for others, too"
        if num_output < len(output):
            processor.push(output[num_output])
        if num_output == 2:
            processor.set_aside()


def test_repetition_penalty_equals_that_of_transformers() -> None:
    """The repetition penalty is the one of transformers (Keskar et al. 2019)."""
    logits = random_logits(1, 61)
    prompt = list(range(0, 40, 3))
    params = SamplingParams(repetition_penalty=1.7)
    processor = LogitsProcessor(params, seen_tokens(params, prompt), (), 61, CPU)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt]), logits.clone())
    torch.testing.assert_close(processor.apply(logits), wanted)


def test_who_waits_has_no_vectors_yet() -> None:
    """Of a vocabulary that would not fit into memory."""
    params = SamplingParams(repetition_penalty=1.7)
    LogitsProcessor(params, seen_tokens(params, [1, 2]), (), 1 << 50, CPU)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_a_prompt_that_was_read_for_another_choice_is_not_read_again(penalty: float) -> None:
    """Nor at all if nothing of it is penalised."""
    params, prompt = SamplingParams(repetition_penalty=penalty, min_tokens=1), make_prompt(9)
    counted = CountedTokens(prompt)
    known = None if penalty == 1.0 else seen_tokens(params, prompt)
    seq = Sequence("a", counted, params, seen_tokens=known, is_prompt_checked=True)
    make_engine().add(seq)
    assert counted.num_read == 0


def test_what_is_not_there_the_engine_collects() -> None:
    """With the same answers."""
    params = SamplingParams(repetition_penalty=5.0, temperature=1.0, seed=3, max_tokens=20)
    prompt = make_prompt(9)
    known, missing = Sequence("a", [*prompt], params), Sequence("a", [*prompt], params)
    known.seen_tokens = seen_tokens(params, prompt)
    for seq in (known, missing):
        run(make_engine(), [seq])
    assert missing.seen_tokens.sort().values.tolist() == sorted({*prompt})
    assert known.token_ids == missing.token_ids
