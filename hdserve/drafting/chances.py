"""What the noise of a sampled choice makes of the probabilities of candidates.

A token that is sampled is the one that arrives first in a race whose noise is known before the
model is asked (:mod:`hdserve.noise`): that of a candidate with probability ``p`` takes ``e / p``,
where ``e`` is its noise.  If ``p`` were the model's own, the first one would be chosen, unless a
token that is no candidate comes before.  How far it is, is learned online: the *chance* of a
candidate is a logistic mix of its probability, its noise, and its share of all candidates' strength
``p / e``.  Greedy choices have no noise; their chances are the probabilities.
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
"""Candidates less likely than this may be missing from those that are learned from, and from those
of a sampled choice.  A share is one of all candidates: what it is worth is learned with as many."""

_PROBABILITY, _NOISE, _SHARE, _ONE = range(4)


@fast_inlined
def needed_probability(databases: Databases, need: float) -> float:
    """How likely a candidate must be to be looked at, if its chance is to reach ``need``."""
    return LEARNING_NEED if databases.state[STATE_IS_SAMPLED] else need


@fast_inlined
def fill_chances(
    databases: Databases, learned: Learned, scratch: Scratch, num: int, depth: int
) -> None:
    """``scratch.chances`` of ``num`` candidates ``depth`` tokens behind the text there is."""
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
