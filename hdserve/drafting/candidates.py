"""What may follow one context: candidates of all databases, each with one calibrated probability.

Every level (context, model, other models, statistics, recycled) contributes the rows of its longest
known contexts, and the copy pointers of context and model contribute the token they stand at.  A
*cell* holds how often evidence of one kind was right: this level, this context length, this share
of the count, this rank.  The logits of the cells that speak for (or, where a known context lacks
the token, against) a candidate are the inputs of the mixer (``mixing``).

::

    row hits ──► cells ──► inputs [candidate, NUM_INPUTS] ──► mixer ──► p(candidate)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hdserve.databases.compiled import inlined
from hdserve.databases.history import MATCH_TOKENS, prefetch_places
from hdserve.databases.ngram import (
    COUNT_SHIFT,
    FIRST_SLOT,
    HASH_SEED,
    NUM_BUCKETS,
    Ints,
    Rows,
    extend_hash,
    find_row,
    prefetch_row,
)
from hdserve.drafting.arrays import (
    ABSENT_CELLS,
    BIAS_INPUT,
    CANDIDATE_LEVEL,
    CANDIDATE_PATTERN,
    CANDIDATE_STATE,
    CANDIDATE_TOKEN,
    CELL_LOGIT,
    CELLS_PER_ROW,
    CONTEXT,
    EVENT_CANDIDATE,
    EVENT_CELL,
    EVENT_INPUT,
    MAP_SIZE,
    MAX_CANDIDATES,
    MAX_ORDER,
    MAX_PROBABILITY,
    MODEL,
    NODE_DEPTH,
    NUM_INPUTS,
    NUM_LEVELS,
    NUM_ORDERS,
    NUM_REACHES,
    NUM_SHARES,
    NUM_TOTALS,
    OTHERS,
    POINTER_INPUT,
    POINTER_SETS,
    POINTER_SIZE,
    POINTER_STATES,
    PRESENT_CELLS,
    RECYCLED,
    ROWS_PER_LEVEL,
    SHARE_BUCKETS,
    SHARE_STEPS,
    STATE_CONTEXT_STAMP,
    STATE_VOCAB_SIZE,
    STATISTICS,
    STRONGEST_SETS,
    Databases,
    Learned,
    Scratch,
)
from hdserve.drafting.mixing import (
    last_set,
    logit_of,
    mix,
    reach_set,
    squash,
    strongest_token,
    token_set,
)
from hdserve.drafting.pointers import fill_suffix, predictions, refresh
from hdserve.drafting.vectors import (
    add_scaled,
    copy_row,
    gather_row,
    lowest_bit,
)
from hdserve.drafting.votes import held_slots, likely_slots, note_cells

_TOKEN_MASK = np.uint32(0xFFFFF)
_TOTAL_MASK = np.uint32(0xFFFF)


class Place(NamedTuple):
    """Where candidates are looked for: behind a node of a tree, the last token of its text if it is
    node 0.

    Attributes:
        levels: those that are asked, a bit each.
        num_suffix, num_shared: how long both rows of ``scratch.suffix`` are.
        pointers: the copy pointers.
        predicted: the tokens both stand at; -1 for none.
        region: the weight set of depth and confidence.
    """

    levels: int
    num_suffix: int
    num_shared: int
    pointers: Ints
    predicted: tuple[int, int]
    region: int


class Table(NamedTuple):
    """The rows of a level, and how many of them are in use."""

    rows: Rows
    size: Ints
    level: int


@inlined
def share_bucket(share: float) -> int:
    """0 to 7 by the share of a row's count; a damaged row may say that it is above 1."""
    return SHARE_BUCKETS[np.uint64(min(share, np.float32(1.0)) * np.float32(SHARE_STEPS))]


@inlined
def total_bucket(total: int) -> int:
    if total <= 2:
        return 0 if total <= 1 else 1
    if total <= 16:
        return 2 if total <= 4 else 3
    return 4 if total <= 128 else 5


@inlined
def row_kind(level: int, order: int, total: int, place: int) -> int:
    """The kind of evidence of a row: its cells are ``CELLS_PER_ROW`` from ``kind *
    CELLS_PER_ROW`` on, those for what it lacks ``NUM_SHARES`` from ``PRESENT_CELLS + kind *
    NUM_SHARES`` on."""
    return ((level * NUM_ORDERS + order) * NUM_TOTALS + total) * ROWS_PER_LEVEL + place


@inlined
def pointer_cell(which: int, is_agreeing: int, length: int, misses: int) -> int:
    bucket = length if length < 8 else min(15, 8 + ((length - 8) >> 2))
    base = PRESENT_CELLS + ABSENT_CELLS + (which * 2 + is_agreeing) * 128
    return base + bucket * 8 + min(misses, 7)


@inlined
def pointer_state(is_agreeing: int, length: int) -> int:
    """1 to 6 by agreement and length; 0 is kept for no pointer."""
    return 1 + (0 if length < 8 else (1 if length < 16 else 2)) + 3 * is_agreeing


@inlined
def fill_hashes(scratch: Scratch, which: int, num_suffix: int) -> None:
    """The hash of each context length up to ``MAX_ORDER`` of one suffix."""
    value = HASH_SEED
    scratch.hashes[which, 0] = value
    for length in range(min(num_suffix, MAX_ORDER)):
        value = extend_hash(value, np.int64(scratch.suffix[which, length]))
        scratch.hashes[which, length + 1] = value


@inlined
def prefetch_level(databases: Databases, scratch: Scratch, table: Table, num_shared: int) -> None:
    """Begin to load what :func:`find_level` will look at."""
    for which in range(NUM_ORDERS):
        order = databases.orders[table.level, which]
        if order < 0 or order > num_shared:
            break
        prefetch_row(table.rows, table.size[NUM_BUCKETS], scratch.hashes[1, order])


@inlined
def find_level(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    place: Place,
    table: Table,
    num_hits: int,
) -> int:
    """Copy the rows of the longest known contexts of a level to ``scratch.rows``, longest first.

    Contexts of the request's own table reach into its prompt, those of the others do not.  Also
    sets what a candidate gets that a row does not hold.  A hit is ``input, level, total, first
    cell``.

    Returns:
        The new number of hits.
    """
    rows, level, num_buckets = table.rows, table.level, table.size[NUM_BUCKETS]
    suffix, num_suffix, min_stamp = 1, place.num_shared, 0
    if level == CONTEXT:
        suffix, num_suffix = 0, place.num_suffix
        min_stamp = databases.state[STATE_CONTEXT_STAMP]
    found = 0
    for which in range(NUM_ORDERS):
        order = databases.orders[level, which]
        if order < 0 or order > num_suffix:
            break
        row = find_row(rows, num_buckets, scratch.hashes[suffix, order], min_stamp)
        if row < 0:
            break
        scratch.found[found] = row
        found += 1
    scratch.reach[level] = min(found, NUM_REACHES - 1)
    for number in range(min(found, 1 if level == RECYCLED else ROWS_PER_LEVEL)):
        which = found - 1 - number
        row = scratch.found[which]
        copy_row(scratch.rows, num_hits, rows, row)
        total = max(1, np.int64(rows[row, 2] & _TOTAL_MASK))
        top = np.int64(rows[row, FIRST_SLOT] >> COUNT_SHIFT)
        kind = row_kind(level, which, total_bucket(total), number)
        share = share_bucket(np.float32(top) / np.float32(total))
        index = level * ROWS_PER_LEVEL + number
        cell = PRESENT_CELLS + kind * NUM_SHARES + share
        scratch.absent_cells[index] = cell
        scratch.template[0, index] = learned.cells[CELL_LOGIT, cell]
        scratch.hits[num_hits, 0] = index
        scratch.hits[num_hits, 1] = level
        scratch.hits[num_hits, 2] = total
        scratch.hits[num_hits, 3] = kind * CELLS_PER_ROW
        num_hits += 1
    return num_hits


@inlined
def prefetch_shared(databases: Databases, scratch: Scratch, levels: int, num_shared: int) -> None:
    """Begin to load the rows of the large tables."""
    if levels & (1 << STATISTICS):
        table = Table(databases.statistics, databases.statistics_size, STATISTICS)
        prefetch_level(databases, scratch, table, num_shared)
    if levels & (1 << MODEL):
        table = Table(databases.model, databases.model_size, MODEL)
        prefetch_level(databases, scratch, table, num_shared)
    if levels & (1 << OTHERS):
        table = Table(databases.others, databases.others_size, OTHERS)
        prefetch_level(databases, scratch, table, num_shared)
    if levels & (1 << RECYCLED):
        table = Table(databases.recycled, databases.recycled_size, RECYCLED)
        prefetch_level(databases, scratch, table, num_shared)


@inlined
def arrive(
    databases: Databases,
    scratch: Scratch,
    levels: int,
    node: int,
    pointers: Ints,
    region: int,
    is_asked: bool,
) -> Place:
    """The place behind a node, with its suffixes and their hashes in ``scratch`` and its pointers
    at what stands there.

    Args:
        is_asked: whether the databases are asked for candidates, so that their rows are loaded
            meanwhile.
    """
    num_suffix, num_shared = fill_suffix(databases, scratch, node)
    fill_hashes(scratch, 0, num_suffix)
    fill_hashes(scratch, 1, num_shared)
    prefetch_places(databases.places, scratch.hashes[0, MATCH_TOKENS])
    prefetch_places(databases.model_places, scratch.hashes[1, MATCH_TOKENS])
    if is_asked:
        prefetch_shared(databases, scratch, levels, num_shared)
    refresh(databases, scratch, pointers, levels, num_suffix, num_shared)
    depth = scratch.nodes[node, NODE_DEPTH]
    predicted = predictions(databases, scratch, pointers, depth, num_suffix)
    return Place(levels, num_suffix, num_shared, pointers, predicted, region)


@inlined
def find_all(databases: Databases, learned: Learned, scratch: Scratch, place: Place) -> int:
    """The rows of all levels that are asked; returns the number of hits."""
    for index in range(NUM_INPUTS):
        scratch.template[0, index] = 0.0
        scratch.absent_cells[index] = -1
    scratch.template[0, BIAS_INPUT] = 1.0
    scratch.reach[:] = 0
    levels, num = place.levels, 0
    if levels & (1 << CONTEXT):
        table = Table(databases.context, databases.context_size, CONTEXT)
        num = find_level(databases, learned, scratch, place, table, num)
    if levels & (1 << MODEL):
        table = Table(databases.model, databases.model_size, MODEL)
        num = find_level(databases, learned, scratch, place, table, num)
    if levels & (1 << OTHERS):
        table = Table(databases.others, databases.others_size, OTHERS)
        num = find_level(databases, learned, scratch, place, table, num)
    if levels & (1 << STATISTICS):
        table = Table(databases.statistics, databases.statistics_size, STATISTICS)
        num = find_level(databases, learned, scratch, place, table, num)
    if levels & (1 << RECYCLED):
        table = Table(databases.recycled, databases.recycled_size, RECYCLED)
        num = find_level(databases, learned, scratch, place, table, num)
    return num


@inlined
def find_or_add(scratch: Scratch, token: int, num: int, generation: int, level: int) -> int:
    """The candidate of ``token``, made from the template if there is none; -1 if full.

    A new candidate has the index ``num``.
    """
    slots = scratch.slots
    slot = ((token * 40503) >> 4) & (MAP_SIZE - 1)
    while slots[slot, 0] == generation:
        index = slots[slot, 1]
        if scratch.candidates[index, CANDIDATE_TOKEN] == token:
            return index
        slot = (slot + 1) & (MAP_SIZE - 1)
    if num >= MAX_CANDIDATES:
        return -1
    slots[slot, 0] = generation
    slots[slot, 1] = num
    scratch.candidates[num, CANDIDATE_TOKEN] = token
    scratch.candidates[num, CANDIDATE_PATTERN] = 0
    scratch.candidates[num, CANDIDATE_STATE] = slots[MAP_SIZE, 1]
    scratch.candidates[num, CANDIDATE_LEVEL] = level
    scratch.evidence[num] = -100.0
    copy_row(scratch.inputs, num, scratch.template, 0)
    return num


@inlined
def note_vote(scratch: Scratch, candidate: int, which: int, level: int, logit: float) -> None:
    """Note what one kind of evidence says for a candidate, which is labelled with the level that
    speaks for it most strongly."""
    scratch.inputs[candidate, which] = logit
    strongest, label = scratch.evidence[candidate], scratch.candidates[candidate, CANDIDATE_LEVEL]
    is_stronger = logit > strongest
    scratch.evidence[candidate] = logit if is_stronger else strongest
    scratch.candidates[candidate, CANDIDATE_LEVEL] = level if is_stronger else label


@inlined
def note_row_vote(scratch: Scratch, candidate: int, which: int, level: int, logit: float) -> None:
    """As :func:`note_vote`, for a row; the pattern keeps the longest context of each level that
    knows the candidate."""
    note_vote(scratch, candidate, which, level, logit)
    pattern = scratch.candidates[candidate, CANDIDATE_PATTERN]
    place = which - level * ROWS_PER_LEVEL
    is_first = (pattern >> (2 * level)) & 3 == 0
    scratch.candidates[candidate, CANDIDATE_PATTERN] = pattern | (
        (place + 1) << (2 * level) if is_first else 0
    )


@inlined
def find_existing(scratch: Scratch, token: int, generation: int) -> int:
    slots = scratch.slots
    slot = ((token * 40503) >> 4) & (MAP_SIZE - 1)
    while slots[slot, 0] == generation:
        index = slots[slot, 1]
        if scratch.candidates[index, CANDIDATE_TOKEN] == token:
            return index
        slot = (slot + 1) & (MAP_SIZE - 1)
    return -1


@inlined
def note_event(scratch: Scratch, num_events: int, candidate: int, which: int, cell: int) -> int:
    """Note for learning that a cell spoke for a candidate; returns the number of events."""
    scratch.events[num_events, EVENT_CANDIDATE] = candidate
    scratch.events[num_events, EVENT_INPUT] = which
    scratch.events[num_events, EVENT_CELL] = cell
    return num_events + 1


@inlined
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
    """Make candidates of what the hit rows hold; returns the numbers of candidates and events.

    Evidence that was right less often than a tenth of ``need`` adds no candidate.  Events are noted
    for learning only.
    """
    num, num_events = counts
    vocab_size = databases.state[STATE_VOCAB_SIZE]
    floor = logit_of(need * 0.1)
    for index in range(num_hits):
        which, level, total = scratch.hits[index, 0], scratch.hits[index, 1], scratch.hits[index, 2]
        scale = np.float32(1.0) / np.float32(total)
        note_cells(scratch.slot_cells, scratch.rows, index, scale, scratch.hits[index, 3])
        gather_row(scratch.slot_logits, learned.cells, CELL_LOGIT, scratch.slot_cells)
        held = held_slots(scratch.rows, index)
        likely = held & likely_slots(scratch.rows, index, vocab_size, scratch.slot_logits, floor)
        unlikely = held & ~likely
        while likely != 0:
            slot = lowest_bit(likely)
            likely &= likely - 1
            token = np.int64(scratch.rows[index, slot] & _TOKEN_MASK)
            candidate = find_or_add(scratch, token, num, generation, level)
            if candidate < 0:
                continue
            num = max(num, candidate + 1)
            note_row_vote(scratch, candidate, which, level, scratch.slot_logits[0, slot])
            if is_learning:
                cell = scratch.slot_cells[0, slot]
                num_events = note_event(scratch, num_events, candidate, which, cell)
        while unlikely != 0:
            slot = lowest_bit(unlikely)
            unlikely &= unlikely - 1
            token = np.int64(scratch.rows[index, slot] & _TOKEN_MASK)
            candidate = find_existing(scratch, token, generation)
            if candidate >= 0:
                note_row_vote(scratch, candidate, which, level, scratch.slot_logits[0, slot])
                if is_learning:
                    cell = scratch.slot_cells[0, slot]
                    num_events = note_event(scratch, num_events, candidate, which, cell)
    return num, num_events


@inlined
def add_pointers(
    databases: Databases,
    learned: Learned,
    scratch: Scratch,
    place: Place,
    generation: int,
) -> tuple[int, int]:
    """Let the copy pointers vote; returns the numbers of candidates and events.

    Comes before :func:`collect`, so that each later candidate starts as one that the pointers
    speak against.
    """
    pointers, predicted = place.pointers, place.predicted
    state = 0
    scale = 1
    for which in range(2):
        if predicted[which] >= 0:
            base = which * POINTER_SIZE
            cell = pointer_cell(which, 0, pointers[base + 1], pointers[base + 2])
            scratch.template[0, POINTER_INPUT + which] = learned.cells[CELL_LOGIT, cell]
            scratch.absent_cells[POINTER_INPUT + which] = cell
            state += scale * pointer_state(0, pointers[base + 1])
        scale *= POINTER_STATES
    scratch.slots[MAP_SIZE, 1] = state
    num, num_events = 0, 0
    scale = 1
    for which in range(2):
        token = predicted[which]
        if token >= 0 and token < databases.state[STATE_VOCAB_SIZE]:
            level = CONTEXT if which == 0 else MODEL
            candidate = find_or_add(scratch, token, num, generation, level)
            num = max(num, candidate + 1)
            base = which * POINTER_SIZE
            cell = pointer_cell(which, 1, pointers[base + 1], pointers[base + 2])
            logit = learned.cells[CELL_LOGIT, cell]
            num_events = note_event(scratch, num_events, candidate, POINTER_INPUT + which, cell)
            note_vote(scratch, candidate, POINTER_INPUT + which, level, logit)
            scratch.candidates[candidate, CANDIDATE_STATE] += 3 * scale
        scale *= POINTER_STATES
    return num, num_events


@inlined
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
    lack.
    """
    generation = scratch.slots[MAP_SIZE, 0] + 1
    scratch.slots[MAP_SIZE, 0] = generation
    num_hits = find_all(databases, learned, scratch, place)
    counts = add_pointers(databases, learned, scratch, place, generation)
    num, num_events = collect(
        databases, learned, scratch, num_hits, counts, generation, need, is_learning
    )
    state = POINTER_SETS + scratch.slots[MAP_SIZE, 1]
    reach = reach_set(scratch)
    scratch.reach[NUM_LEVELS] = reach
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
