"""How the noise of a sampled choice changes the probabilities of candidates.

A sampled token is the one that arrives first in a race whose noise is known before the model is
asked (:mod:`hdserve.noise`): a candidate with probability ``p`` and noise ``e`` arrives at ``e /
p``.  If ``p`` were the model's own, the first candidate would be chosen, unless a token that is not
a candidate arrives before it.  How reliable ``p`` is, is learned online: the *chance* of a
candidate is a logistic mix of its probability, its noise, and its share of the sum of ``p / e``
over all candidates.  Greedy choices have no noise; their chances are the probabilities.
"""

from __future__ import annotations

import math

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.drafting.arrays import (
    CANDIDATE_TOKEN,
    CHANCE_SET,
    MAX_PROBABILITY,
    STATE_IS_SAMPLED,
    STATE_NOISE_KEY,
    STATE_NUM_EXPECTED,
    STATE_NUM_TOKENS,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.mixing import logit_of, squash
from hdserve.drafting.vectors import add_scaled, dot
from hdserve.noise import exponential, noise_word, position_key

LEARNING_NEED = 0.002
"""Less likely candidates may be missing from those that are learned from, and from those of a
sampled choice.  A share depends on all candidates, so its worth is learned with the same ones."""

_PROBABILITY, _NOISE, _SHARE, _ONE = range(4)


@fast_inlined
def needed_probability(databases: Databases, need: float) -> float:
    """The least probability of a candidate whose chance may reach ``need``."""
    return LEARNING_NEED if databases.state[STATE_IS_SAMPLED] else need


@fast_inlined
def fill_chances(
    databases: Databases, learned: Learned, scratch: Scratch, num: int, depth: int
) -> None:
    """Fill ``scratch.chances`` of ``num`` candidates, ``depth`` tokens after the actual text."""
    state, probabilities, chances = databases.state, scratch.probabilities, scratch.chances
    for index in range(num):
        chances[index] = probabilities[index]
    if not state[STATE_IS_SAMPLED]:
        return
    inputs = scratch.chance_inputs
    position = state[STATE_NUM_TOKENS] - state[STATE_NUM_EXPECTED] + depth
    key = position_key(state[STATE_NOISE_KEY], position)
    whole = np.float32(0.0)
    for index in range(num):
        token = scratch.candidates[index, CANDIDATE_TOKEN]
        noise = np.float32(exponential(noise_word(key, token)))
        inputs[index, _NOISE] = -math.log(noise)
        chances[index] /= noise
        whole += chances[index]
    for index in range(num):
        if probabilities[index] > 0.0:
            inputs[index, _PROBABILITY] = logit_of(probabilities[index])
            inputs[index, _SHARE] = logit_of(chances[index] / whole)
            inputs[index, _ONE] = 1.0
            chance = squash(dot(learned.weights, CHANCE_SET, inputs, index))
            chances[index] = min(np.float32(MAX_PROBABILITY), chance)


@fast_inlined
def learn_chances(learned: Learned, scratch: Scratch, num: int, right: int, rate: float) -> None:
    """One step of the weights; ``right`` is the index of the candidate that came, or -1."""
    for index in range(num):
        if scratch.probabilities[index] > 0.0:
            error = np.float32(index == right) - scratch.chances[index]
            step = np.float32(rate) * error
            add_scaled(learned.weights, CHANCE_SET, step, scratch.chance_inputs, index)
