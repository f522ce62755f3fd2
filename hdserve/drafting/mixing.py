"""How the evidence for candidates is mixed: an online-learned logistic mixer.

In the manner of PAQ (Mahoney 2005).  The inputs of a candidate are weighed by a sum of weight sets,
chosen by the pattern of evidence, by the state of the copy pointers, by depth and how predictable
the text was, by how long the known contexts are, by how far back the request's own text has the
candidate last, and by the candidate's token, the token before it, and the token with the strongest
evidence.
Biases are learned as well: of the token alone, after the token before, and given the strongest.
"""

from __future__ import annotations

import math

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.databases.last_positions import distance_to
from hdserve.databases.ngram import HASH_SEED, extend_hash
from hdserve.drafting.arrays import (
    CANDIDATE_PATTERN,
    CANDIDATE_SETS,
    CANDIDATE_STATE,
    CANDIDATE_TOKEN,
    CONTEXT,
    DISTANCE_LIMITS,
    DISTANCE_SETS,
    LAST_SETS,
    MODEL,
    NUM_CONFIDENCES,
    NUM_PAIRS,
    NUM_REACHES,
    NUM_TOKEN_SETS,
    POINTER_SETS,
    REACH_SETS,
    REGION_SETS,
    SHARED,
    STATE_NUM_TOKENS,
    STATISTICS,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.vectors import dot, dot_of_sum


@fast_inlined
def confidence_after(confidence: int, probability: float) -> int:
    """Record how likely the last token was thought to be; keeps the last two such records."""
    if probability < 0.3:
        bucket = 0 if probability < 0.05 else 1
    elif probability < 0.7:
        bucket = 2
    else:
        bucket = 3 if probability < 0.95 else 4
    return bucket * NUM_CONFIDENCES + confidence // NUM_CONFIDENCES


@fast_inlined
def region_set(depth: int, confidence: int) -> int:
    """The weight set of a place: its depth in the tree, and how predictable the text before it
    is."""
    level = depth if depth < 3 else (3 if depth < 6 else 4)
    return REGION_SETS + level * NUM_CONFIDENCES**2 + confidence


@fast_inlined
def reach_set(scratch: Scratch) -> int:
    """The weight set of the lengths of the known contexts of context, model and statistics."""
    reach = scratch.reach
    index = (reach[CONTEXT] * NUM_REACHES + reach[MODEL]) * NUM_REACHES + reach[STATISTICS]
    return REACH_SETS + index


@fast_inlined
def distance_set(databases: Databases, token: int) -> int:
    """The weight set of the distance to the last occurrence of the token in the text, not counting
    guesses."""
    distance = distance_to(databases.last_positions, token, databases.state[STATE_NUM_TOKENS])
    which = np.int64(distance > 0)
    for limit in DISTANCE_LIMITS:
        which += distance > limit
    return DISTANCE_SETS + which


@fast_inlined
def token_set(kind: int, token: int) -> int:
    """Which weight set of one kind of sets by token, ``*_SETS``, belongs to ``token``."""
    return kind + (token & (NUM_TOKEN_SETS - 1))


@fast_inlined
def strongest_token(scratch: Scratch, num: int) -> int:
    """Of ``num`` candidates the token with the strongest evidence; 0 if there are none."""
    token, strongest = 0, np.float32(-100.0)
    for index in range(num):
        if scratch.evidence[index] > strongest:
            strongest = scratch.evidence[index]
            token = scratch.candidates[index, CANDIDATE_TOKEN]
    return token


@fast_inlined
def last_set(scratch: Scratch) -> int:
    """The weight set of the last token of the output."""
    return token_set(LAST_SETS, np.int64(scratch.suffix[SHARED, 0]))


@fast_inlined
def pair_after(scratch: Scratch, token: int) -> int:
    """The index of the bias of ``token`` after the last token of the output."""
    return np.int64(extend_hash(scratch.hashes[SHARED, 1], token) & np.uint64(NUM_PAIRS - 1))


@fast_inlined
def pair_beside(strongest: int, token: int) -> int:
    """The index of the bias of ``token`` if ``strongest`` has the strongest evidence."""
    pair = extend_hash(extend_hash(HASH_SEED, strongest), token)
    return NUM_PAIRS + np.int64(pair & np.uint64(NUM_PAIRS - 1))


@fast_inlined
def mix(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    index: int,
    state: int,
    strongest: int,
) -> float:
    """The logit of one candidate; ``state`` is that of a candidate without an agreeing pointer,
    ``strongest`` the token with the strongest evidence."""
    token = scratch.candidates[index, CANDIDATE_TOKEN]
    pattern = scratch.candidates[index, CANDIDATE_PATTERN]
    distance = distance_set(databases, token)
    logit = dot_of_sum(
        learned.weights,
        pattern,
        distance,
        learned.token_weights,
        token_set(CANDIDATE_SETS, token),
        scratch.base_weights,
        scratch.inputs,
        index,
    )
    own_state = POINTER_SETS + scratch.candidates[index, CANDIDATE_STATE]
    if own_state != state:
        logit += dot(learned.weights, own_state, scratch.inputs, index)
        logit -= dot(learned.weights, state, scratch.inputs, index)
    logit += learned.token_bias[token] + learned.pair_bias[pair_after(scratch, token)]
    return logit + learned.pair_bias[pair_beside(strongest, token)]


@fast_inlined
def squash(logit: float) -> float:
    """The logistic function: the probability of a logit."""
    one = np.float32(1.0)
    return one / (one + math.exp(-np.float32(logit)))


@fast_inlined
def logit_of(probability: float) -> float:
    """The inverse of :func:`squash`, between -8 and 8."""
    p = min(max(np.float32(probability), np.float32(0.0003)), np.float32(0.9997))
    return math.log(p / (np.float32(1.0) - p))
