"""What may follow one context: candidates of all databases, each with one calibrated probability.

Every level (context, model, other models, statistics, recycled) contributes the rows of its longest
known contexts, and the copy pointers of context and model the token they point to.  A *cell* holds
how often evidence of one kind was right: this level, this context length, this share of the count,
this rank.  The logits of the cells that speak for a candidate (or against it, if a known context
lacks the token) are the inputs of the mixer (``mixing``).

::

    row hits ──► cells ──► inputs [candidate, NUM_INPUTS] ──► mixer ──► p(candidate)
"""

from __future__ import annotations

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.databases.ngram import TOKEN_MASK
from hdserve.drafting.arrays import (
    CANDIDATE_LEVEL,
    CANDIDATE_PATTERN,
    CANDIDATE_STATE,
    CANDIDATE_TOKEN,
    CELL_LOGIT,
    CHOSEN_REACH,
    CONTEXT,
    EVENT_CANDIDATE,
    EVENT_CELL,
    EVENT_INPUT,
    HIT_CELL,
    HIT_INPUT,
    HIT_LEVEL,
    HIT_TOTAL,
    MAP_SIZE,
    MAX_CANDIDATES,
    MAX_PROBABILITY,
    MODEL,
    POINTER_INPUT,
    POINTER_LENGTH,
    POINTER_MISSES,
    POINTER_SETS,
    POINTER_SIZE,
    POINTER_STATES,
    PRESENT_SLOT,
    PRESENT_STATE,
    ROWS_PER_LEVEL,
    SLOT_CANDIDATE,
    SLOT_GENERATION,
    STATE_VOCAB_SIZE,
    STRONGEST_SETS,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.cells import pointer_cell, pointer_state
from hdserve.drafting.known_contexts import Place, find_all
from hdserve.drafting.mixing import (
    last_set,
    logit_of,
    mix,
    reach_set,
    squash,
    strongest_token,
    token_set,
)
from hdserve.drafting.vectors import add_scaled, copy_row, gather_row, lowest_bit
from hdserve.drafting.votes import held_slots, likely_slots, note_cells


@fast_inlined
def find_slot(scratch: Scratch, token: int, generation: int) -> int:
    """The slot of the candidate of ``token``; if there is none, a free slot for it."""
    slots = scratch.slots
    slot = ((token * 40503) >> 4) & (MAP_SIZE - 1)
    while (
        slots[slot, SLOT_GENERATION] == generation
        and scratch.candidates[slots[slot, SLOT_CANDIDATE], CANDIDATE_TOKEN] != token
    ):
        slot = (slot + 1) & (MAP_SIZE - 1)
    return slot


@fast_inlined
def find_candidate(scratch: Scratch, token: int, generation: int) -> int:
    """The candidate of ``token``; -1 if there is none."""
    slot = find_slot(scratch, token, generation)
    is_held = scratch.slots[slot, SLOT_GENERATION] == generation
    return scratch.slots[slot, SLOT_CANDIDATE] if is_held else -1


@fast_inlined
def find_or_add(scratch: Scratch, token: int, num: int, generation: int, level: int) -> int:
    """The candidate of ``token``, created from the template if there is none; -1 if full.

    A new candidate has the index ``num``.
    """
    slots, slot = scratch.slots, find_slot(scratch, token, generation)
    if slots[slot, SLOT_GENERATION] == generation:
        return slots[slot, SLOT_CANDIDATE]
    if num >= MAX_CANDIDATES:
        return -1
    slots[slot, SLOT_GENERATION] = generation
    slots[slot, SLOT_CANDIDATE] = num
    scratch.candidates[num, CANDIDATE_TOKEN] = token
    scratch.candidates[num, CANDIDATE_PATTERN] = 0
    scratch.candidates[num, CANDIDATE_STATE] = slots[PRESENT_SLOT, PRESENT_STATE]
    scratch.candidates[num, CANDIDATE_LEVEL] = level
    scratch.evidence[num] = -100.0
    copy_row(scratch.inputs, num, scratch.template, 0)
    return num


@fast_inlined
def note_vote(scratch: Scratch, candidate: int, which: int, level: int, logit: float) -> None:
    """Record one vote of evidence for a candidate, which is labelled with the level that speaks for
    it most strongly."""
    scratch.inputs[candidate, which] = logit
    strongest, label = scratch.evidence[candidate], scratch.candidates[candidate, CANDIDATE_LEVEL]
    is_stronger = logit > strongest
    scratch.evidence[candidate] = logit if is_stronger else strongest
    scratch.candidates[candidate, CANDIDATE_LEVEL] = level if is_stronger else label


@fast_inlined
def note_row_vote(scratch: Scratch, candidate: int, which: int, level: int, logit: float) -> None:
    """Record a row's vote for a candidate, as :func:`note_vote` does; the pattern keeps the longest
    context of each level that knows the candidate."""
    note_vote(scratch, candidate, which, level, logit)
    pattern = scratch.candidates[candidate, CANDIDATE_PATTERN]
    place = which - level * ROWS_PER_LEVEL
    is_first = (pattern >> (2 * level)) & 3 == 0
    scratch.candidates[candidate, CANDIDATE_PATTERN] = pattern | (
        (place + 1) << (2 * level) if is_first else 0
    )


@fast_inlined
def note_event(scratch: Scratch, num_events: int, candidate: int, which: int, cell: int) -> int:
    """Record for learning that a cell voted for a candidate; returns the number of events."""
    scratch.events[num_events, EVENT_CANDIDATE] = candidate
    scratch.events[num_events, EVENT_INPUT] = which
    scratch.events[num_events, EVENT_CELL] = cell
    return num_events + 1


@fast_inlined
def take_vote(
    scratch: Scratch,
    candidate: int,
    which: int,
    level: int,
    slot: int,
    num_events: int,
    is_learning: bool,
) -> int:
    """Record the vote of a row's slot for a candidate; returns the number of events."""
    note_row_vote(scratch, candidate, which, level, scratch.slot_logits[0, slot])
    if is_learning:
        cell = scratch.slot_cells[0, slot]
        num_events = note_event(scratch, num_events, candidate, which, cell)
    return num_events


@fast_inlined
def collect(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    num_hits: int,
    counts: tuple[int, int],
    generation: int,
    need: float,
    is_learning: bool,
) -> tuple[int, int]:
    """Create candidates from the hit rows; returns the numbers of candidates and events.

    Evidence that was right less often than a tenth of ``need`` adds no candidate.  Events are only
    recorded for learning.
    """
    num, num_events = counts
    vocab_size = databases.state[STATE_VOCAB_SIZE]
    floor = logit_of(need * 0.1)
    for hit in range(num_hits):
        which, level = scratch.hits[hit, HIT_INPUT], scratch.hits[hit, HIT_LEVEL]
        total, first_cell = scratch.hits[hit, HIT_TOTAL], scratch.hits[hit, HIT_CELL]
        scale = np.float32(1.0) / np.float32(total)
        note_cells(scratch.slot_cells, scratch.rows, hit, scale, first_cell)
        gather_row(scratch.slot_logits, learned.cells, CELL_LOGIT, scratch.slot_cells)
        held = held_slots(scratch.rows, hit)
        likely = held & likely_slots(scratch.rows, hit, vocab_size, scratch.slot_logits, floor)
        unlikely = held & ~likely
        while likely != 0:
            slot = lowest_bit(likely)
            likely &= likely - 1
            token = np.int64(scratch.rows[hit, slot] & TOKEN_MASK)
            candidate = find_or_add(scratch, token, num, generation, level)
            if candidate >= 0:
                num = max(num, candidate + 1)
                num_events = take_vote(
                    scratch, candidate, which, level, slot, num_events, is_learning
                )
        while unlikely != 0:
            slot = lowest_bit(unlikely)
            unlikely &= unlikely - 1
            token = np.int64(scratch.rows[hit, slot] & TOKEN_MASK)
            candidate = find_candidate(scratch, token, generation)
            if candidate >= 0:
                num_events = take_vote(
                    scratch, candidate, which, level, slot, num_events, is_learning
                )
    return num, num_events


@fast_inlined
def add_pointers(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    place: Place,
    generation: int,
) -> tuple[int, int]:
    """Let the copy pointers vote; returns the numbers of candidates and events.

    Call it before :func:`collect`, so that each later candidate starts as one that the pointers
    speak against.
    """
    pointers, predicted = place.pointers, place.predicted
    state = 0
    scale = 1
    for which in range(2):
        if predicted[which] >= 0:
            base = which * POINTER_SIZE
            length, misses = pointers[base + POINTER_LENGTH], pointers[base + POINTER_MISSES]
            cell = pointer_cell(which, 0, length, misses)
            scratch.template[0, POINTER_INPUT + which] = learned.cells[CELL_LOGIT, cell]
            scratch.absent_cells[POINTER_INPUT + which] = cell
            state += scale * pointer_state(length)
        scale *= POINTER_STATES
    scratch.slots[PRESENT_SLOT, PRESENT_STATE] = state
    num, num_events = 0, 0
    scale = 1
    for which in range(2):
        token = predicted[which]
        if token >= 0 and token < databases.state[STATE_VOCAB_SIZE]:
            level = CONTEXT if which == 0 else MODEL
            candidate = find_or_add(scratch, token, num, generation, level)
            num = max(num, candidate + 1)
            base = which * POINTER_SIZE
            length, misses = pointers[base + POINTER_LENGTH], pointers[base + POINTER_MISSES]
            cell = pointer_cell(which, 1, length, misses)
            logit = learned.cells[CELL_LOGIT, cell]
            num_events = note_event(scratch, num_events, candidate, POINTER_INPUT + which, cell)
            note_vote(scratch, candidate, POINTER_INPUT + which, level, logit)
            scratch.candidates[candidate, CANDIDATE_STATE] += 3 * scale
        scale *= POINTER_STATES
    return num, num_events


@fast_inlined
def expand(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    place: Place,
    need: float,
    is_learning: bool,
) -> tuple[int, int]:
    """Fill ``scratch.candidates`` and ``scratch.probabilities`` for a place, and for learning
    ``scratch.events``; returns the numbers of candidates and events.  Candidates below ``need`` may
    be missing.
    """
    generation = scratch.slots[PRESENT_SLOT, SLOT_GENERATION] + 1
    scratch.slots[PRESENT_SLOT, SLOT_GENERATION] = generation
    num_hits = find_all(databases, learned, scratch, place)
    counts = add_pointers(databases, learned, scratch, place, generation)
    num, num_events = collect(
        databases, learned, scratch, num_hits, counts, generation, need, is_learning
    )
    state = POINTER_SETS + scratch.slots[PRESENT_SLOT, PRESENT_STATE]
    reach = reach_set(scratch)
    scratch.reach[CHOSEN_REACH] = reach
    copy_row(scratch.base_weights, 0, learned.weights, state)
    add_scaled(scratch.base_weights, 0, np.float32(1.0), learned.weights, place.region)
    add_scaled(scratch.base_weights, 0, np.float32(1.0), learned.weights, reach)
    strongest = strongest_token(scratch, num)
    for which in (token_set(STRONGEST_SETS, strongest), last_set(scratch)):
        add_scaled(scratch.base_weights, 0, np.float32(1.0), learned.token_weights, which)
    lowest = logit_of(need) if need > 0.0003 else np.float32(-30.0)
    for index in range(num):
        logit = mix(databases, learned, scratch, index, state, strongest)
        scratch.probabilities[index] = (
            min(np.float32(MAX_PROBABILITY), squash(logit)) if logit > lowest else np.float32(0.0)
        )
    return num, num_events
