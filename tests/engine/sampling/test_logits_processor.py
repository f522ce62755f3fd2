"""Penalties, biases and ``min_tokens`` are what their definitions say."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hdserve.core import SamplingParams
from hdserve.engine.sampling.allowed_tokens import AllowedTokens
from hdserve.engine.sampling.logits_processor import LogitsProcessor
from hdserve.engine.sampling.sampler import choose_checked
from tests.engine.sampling.test_sampler import CPU, random_logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_beyond_all_numbers_leaves_the_likeliest(temperature: float) -> None:
    """Seen tokens, here, of which one is chosen as they are all as likely."""
    params = SamplingParams(temperature=temperature, repetition_penalty=Fraction(1, 10**39))  # type: ignore[arg-type]
    logits = random_logits(1, 61)
    seen = logits[0].topk(5).indices.tolist()
    shaped = LogitsProcessor(params, seen, (), 61, CPU).apply(logits)
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
    processor = LogitsProcessor(params, prompt, ending, vocab_size, CPU, allowed)
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
    processor = LogitsProcessor(SamplingParams(repetition_penalty=1.7), prompt, (), 61, CPU)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt]), logits.clone())
    torch.testing.assert_close(processor.apply(logits), wanted)


def test_who_waits_has_no_vectors_yet() -> None:
    """Of a vocabulary that would not fit into memory."""
    LogitsProcessor(SamplingParams(repetition_penalty=1.7), [1, 2], (), 1 << 50, CPU)
