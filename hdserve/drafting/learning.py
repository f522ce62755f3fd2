"""Learning from what the model chose: cells, mixer weights and the request's own table."""

from __future__ import annotations

import math

import numpy as np

from hdserve.databases.history import MATCH_TOKENS, head_slot, match_key
from hdserve.databases.ngram import NUM_ADDED, Ints, Tokens, inlined, insert_tokens, jit
from hdserve.drafting.arrays import (
    CANDIDATE_PATTERN,
    CANDIDATE_STATE,
    CANDIDATE_TOKEN,
    CELL_COUNT,
    CELL_LOGIT,
    CELL_P,
    CONTEXT,
    NODE_DEPTH,
    NUM_INPUTS,
    NUM_LEVELS,
    POINTER_INPUT,
    POINTER_SETS,
    STATE_CONFIDENCE,
    STATE_CONTEXT_STAMP,
    STATE_NUM_TOKENS,
    STATE_POINTERS,
    Learned,
    Scratch,
)
from hdserve.drafting.candidates import (
    confidence_after,
    expand,
    region_set,
)
from hdserve.drafting.handles import databases_of, learned_of, scratch_of
from hdserve.drafting.pointers import advance, fill_suffix, predictions, refresh

LEARNING_NEED = 0.002
MAX_CELL_COUNT = 1000.0
CELL_DELAY = 4.0


@inlined
def update_cell(learned: Learned, cell: int, num: int, num_right: int) -> None:
    """Note that evidence of one kind was given ``num`` times and right ``num_right`` times."""
    cells = learned.cells
    count = cells[cell, CELL_COUNT]
    p = (cells[cell, CELL_P] * (count + CELL_DELAY) + num_right) / (count + CELL_DELAY + num)
    cells[cell, CELL_P] = p
    cells[cell, CELL_COUNT] = min(count + num, MAX_CELL_COUNT)
    p = min(max(p, 0.0003), 0.9997)
    cells[cell, CELL_LOGIT] = math.log(p / (1.0 - p))


@inlined
def learn_token(
    learned: Learned,
    scratch: Scratch,
    num: int,
    token: int,
    region: int,
    rate: float,
    bias_rate: float,
) -> float:
    """Update everything that took part in the candidates of a context that ``token`` followed.

    Returns:
        How likely ``token`` was thought to be.
    """
    probability = 0.0
    reach = scratch.reach[NUM_LEVELS]
    for index in range(num):
        is_right = scratch.candidates[index, CANDIDATE_TOKEN] == token
        if is_right:
            probability = scratch.probabilities[index]
        error = (1.0 if is_right else 0.0) - scratch.probabilities[index]
        pattern = scratch.candidates[index, CANDIDATE_PATTERN]
        state = POINTER_SETS + scratch.candidates[index, CANDIDATE_STATE]
        step = np.float32(rate * error)
        for which in range(NUM_INPUTS):
            change = step * scratch.inputs[index, which]
            learned.weights[pattern, which] += change
            learned.weights[state, which] += change
            learned.weights[region, which] += change
            learned.weights[reach, which] += change
        learned.token_bias[scratch.candidates[index, CANDIDATE_TOKEN]] += bias_rate * error
    for which in range(POINTER_INPUT + 2):
        absent = scratch.absent_cells[which]
        num_absent, num_right = 0, 0
        for index in range(num):
            cell = scratch.input_cells[index, which]
            if cell < 0:
                continue
            is_right = scratch.candidates[index, CANDIDATE_TOKEN] == token
            if cell == absent:
                num_absent += 1
                num_right += is_right
            else:
                update_cell(learned, cell, 1, 1 if is_right else 0)
        if num_absent > 0:
            update_cell(learned, absent, num_absent, num_right)
    return probability


@jit
def commit(
    database_handles: Ints,
    learned_handles: Ints,
    scratch_handles: Ints,
    levels: int,
    new_tokens: Tokens,
    rate: float,
    bias_rate: float,
) -> int:
    """Learn from tokens the model decided and append them to the request's own text.

    Returns:
        Contexts added to the table so far.
    """
    databases = databases_of(database_handles)
    learned = learned_of(learned_handles)
    scratch = scratch_of(scratch_handles)
    state = databases.state
    pointers = state[STATE_POINTERS:]
    scratch.nodes[0, NODE_DEPTH] = 0
    for index in range(new_tokens.shape[0]):
        token = np.int64(new_tokens[index])
        num_suffix, num_shared = fill_suffix(databases, scratch, 0)
        refresh(databases, scratch, pointers, num_suffix, num_shared)
        predicted = predictions(databases, scratch, levels, pointers, 0, num_suffix)
        if rate > 0.0:
            region = region_set(index, state[STATE_CONFIDENCE])
            num = expand(
                databases,
                learned,
                scratch,
                levels,
                num_suffix,
                num_shared,
                pointers,
                predicted,
                region,
                LEARNING_NEED,
            )
            p = learn_token(learned, scratch, num, token, region, rate, bias_rate)
            state[STATE_CONFIDENCE] = confidence_after(state[STATE_CONFIDENCE], p)
        advance(pointers, predicted, token)
        position = state[STATE_NUM_TOKENS]
        if position >= MATCH_TOKENS:
            slot = head_slot(match_key(databases.tokens, position), databases.heads.shape[0])
            databases.heads[slot] = position
        databases.tokens[position] = token
        state[STATE_NUM_TOKENS] = position + 1
        insert_tokens(
            databases.context,
            databases.context_size,
            databases.tokens,
            position,
            position + 1,
            databases.orders[CONTEXT],
            state[STATE_CONTEXT_STAMP],
            state[STATE_CONTEXT_STAMP],
        )
    return databases.context_size[NUM_ADDED]
