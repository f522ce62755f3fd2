"""Learning from what the model chose: cells, mixer weights and the request's own table."""

from __future__ import annotations

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.databases.history import MATCH_TOKENS, match_key, note_place
from hdserve.databases.last_positions import note_position
from hdserve.databases.ngram import Ints, insert_tokens
from hdserve.drafting.arrays import (
    CANDIDATE_PATTERN,
    CANDIDATE_SETS,
    CANDIDATE_STATE,
    CANDIDATE_TOKEN,
    CELL_COUNT,
    CELL_LOGIT,
    CELL_P,
    CHOSEN_REACH,
    CONTEXT,
    EVENT_CANDIDATE,
    EVENT_CELL,
    EVENT_INPUT,
    NODE_DEPTH,
    POINTER_INPUT,
    POINTER_LENGTH,
    POINTER_SETS,
    POINTER_SIZE,
    PRESENT_SLOT,
    PRESENT_STATE,
    STATE_CONFIDENCE,
    STATE_CONTEXT_STAMP,
    STATE_IS_SAMPLED,
    STATE_NUM_TOKENS,
    STATE_POINTERS,
    STATISTICS,
    STRONGEST_SETS,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.candidates import expand
from hdserve.drafting.chances import LEARNING_NEED, fill_chances, learn_chances
from hdserve.drafting.known_contexts import arrive
from hdserve.drafting.mixing import (
    confidence_after,
    distance_set,
    last_set,
    logit_of,
    pair_after,
    pair_beside,
    region_set,
    strongest_token,
    token_set,
)
from hdserve.drafting.pointers import advance
from hdserve.drafting.vectors import add_scaled

MAX_CELL_COUNT = 1000.0
"""The most observations of a cell.  A further one then replaces one part in this many, so older
ones fade."""

CELL_DELAY = 4.0
"""The number of observations that a new cell's first guess counts as."""

LONG_COPY = 8
"""The number of tokens from which on a copy is long; docs/adr/0013 lists the other values that were
tried."""


@fast_inlined
def update_cell(learned: Learned, cell: int, num: int, num_right: int) -> None:
    """Record that evidence of one kind was given ``num`` times and right ``num_right`` times."""
    cells = learned.cells
    count = cells[CELL_COUNT, cell]
    seen = count + np.float32(CELL_DELAY)
    p = (cells[CELL_P, cell] * seen + np.float32(num_right)) / (seen + np.float32(num))
    cells[CELL_P, cell] = p
    cells[CELL_COUNT, cell] = min(count + np.float32(num), np.float32(MAX_CELL_COUNT))
    cells[CELL_LOGIT, cell] = logit_of(p)


@fast_inlined
def learn_cells(learned: Learned, scratch: Scratch, num: int, num_events: int, right: int) -> None:
    """Update the cells of the evidence for and against ``num`` candidates; ``right`` is the index
    of the one that came, or -1."""
    num_present, right_present = scratch.found, 0
    num_present[:] = 0
    for event in range(num_events):
        which = np.int64(scratch.events[event, EVENT_INPUT])
        is_right = scratch.events[event, EVENT_CANDIDATE] == right
        num_present[which] += 1
        right_present |= is_right << which
        update_cell(learned, np.int64(scratch.events[event, EVENT_CELL]), 1, 1 if is_right else 0)
    for which in range(POINTER_INPUT + 2):
        cell = np.int64(scratch.absent_cells[which])
        num_absent = num - num_present[which]
        if cell >= 0 and num_absent > 0:
            is_right = right >= 0 and (right_present >> which) & 1 == 0
            update_cell(learned, cell, num_absent, 1 if is_right else 0)


@fast_inlined
def learn_weights(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    num: int,
    token: int,
    region: int,
    rate: float,
    bias_rate: float,
) -> int:
    """One step of each weight set that took part; returns the index of ``token`` or -1."""
    right = -1
    base_state = POINTER_SETS + scratch.slots[PRESENT_SLOT, PRESENT_STATE]
    strongest = strongest_token(scratch, num)
    gradient, inputs, weights = scratch.gradient, scratch.inputs, learned.weights
    token_weights = learned.token_weights
    gradient[:] = 0.0
    for index in range(num):
        candidate = scratch.candidates[index, CANDIDATE_TOKEN]
        error = -scratch.probabilities[index]
        if candidate == token:
            right = index
            error += np.float32(1.0)
        pattern = scratch.candidates[index, CANDIDATE_PATTERN]
        step = np.float32(rate) * error
        add_scaled(weights, pattern, step, inputs, index)
        add_scaled(weights, distance_set(databases, candidate), step, inputs, index)
        own_set = token_set(CANDIDATE_SETS, candidate)
        add_scaled(token_weights, own_set, step, inputs, index)
        add_scaled(gradient, 0, step, inputs, index)
        state = POINTER_SETS + scratch.candidates[index, CANDIDATE_STATE]
        if state != base_state:
            add_scaled(weights, state, step, inputs, index)
            add_scaled(weights, base_state, -step, inputs, index)
        bias_step = np.float32(bias_rate) * error
        learned.token_bias[candidate] += bias_step
        learned.pair_bias[pair_after(scratch, candidate)] += bias_step
        learned.pair_bias[pair_beside(strongest, candidate)] += bias_step
    reach = scratch.reach[CHOSEN_REACH]
    for which in (base_state, region, reach):
        add_scaled(weights, which, np.float32(1.0), gradient, 0)
    for which in (token_set(STRONGEST_SETS, strongest), last_set(scratch)):
        add_scaled(token_weights, which, np.float32(1.0), gradient, 0)
    return right


@fast_inlined
def step_size(rate: float, levels: int, pointers: Ints) -> float:
    """Half the rate if there are statistics, which bring more candidates and so more updates for
    every token; but the full rate along a copy, whose worth must be learned within a few tokens."""
    is_copy = max(pointers[POINTER_LENGTH], pointers[POINTER_SIZE + POINTER_LENGTH]) >= LONG_COPY
    return rate if is_copy or not levels >> STATISTICS & 1 else 0.5 * rate


@fast_inlined
def append_token(databases: Databases, token: int) -> None:
    """Append a token to the request's own text, its copy index, and its table."""
    state = databases.state
    position = state[STATE_NUM_TOKENS]
    if position >= MATCH_TOKENS:
        note_place(databases.places, match_key(databases.tokens, position), position)
    databases.tokens[position] = token
    note_position(databases.last_positions, token, position)
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


@fast_inlined
def commit(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    levels: int,
    new_tokens: Ints,
    num_learned: int,
    rate: float,
    bias_rate: float,
) -> None:
    """Append ``new_tokens``, which the model decided, to the request's own text, and learn from the
    last ``num_learned`` of them.

    Args:
        rate: step size of the mixer weights, see :func:`step_size`; if it is 0 nothing at all is
            learned.
        bias_rate: step size of the biases of tokens and pairs.
    """
    state = databases.state
    pointers = state[STATE_POINTERS:]
    scratch.nodes[0, NODE_DEPTH] = 0
    first_learned = len(new_tokens) - num_learned
    for index in range(len(new_tokens)):
        token = new_tokens[index]
        is_learned = rate > 0.0 and index >= first_learned
        region = region_set(max(index - first_learned, 0), state[STATE_CONFIDENCE])
        place = arrive(databases, scratch, levels, 0, pointers, region, is_learned)
        if is_learned:
            num, num_events = expand(databases, learned, scratch, place, LEARNING_NEED, True)
            step = step_size(rate, levels, pointers)
            right = learn_weights(databases, learned, scratch, num, token, region, step, bias_rate)
            learn_cells(learned, scratch, num, num_events, right)
            if state[STATE_IS_SAMPLED]:
                fill_chances(databases, learned, scratch, num, 0)
                learn_chances(learned, scratch, num, right, rate)
            p = scratch.probabilities[right] if right >= 0 else np.float32(0.0)
            state[STATE_CONFIDENCE] = confidence_after(state[STATE_CONFIDENCE], p)
        advance(databases, pointers, place.predicted, token)
        append_token(databases, token)
