"""Copy pointers: where in earlier text the sequence seems to be, and what comes next there.

A pointer is ``position, length, misses``: the position of the predicted token in a log, how many
tokens agreed before it, and how often it was wrong since it was set.  Near copies differ in single
tokens (a name, a number), so after a wrong token it stays aligned, whatever the difference was::

    log        a b c d e f          after "a b" the pointer is at c
    replaced   a b x d e f          x: moves to d
    left out   a b d e f            d comes after c: moves to e
    inserted   a b x c d e f        x: moves to d;  c comes before d: stays at d

    It moves to another place as soon as the index has a match there.
"""

from __future__ import annotations

import numpy as np

from hdserve.databases.compiled import fast_inlined
from hdserve.databases.history import (
    LOG_END,
    LOG_OLDEST,
    MATCH_TOKENS,
    MAX_MATCH,
    find_longest,
)
from hdserve.databases.ngram import START, Ints
from hdserve.drafting.arrays import (
    CONTEXT,
    MAX_SUFFIX,
    MODEL,
    NODE_DEPTH,
    NODE_PARENT,
    NODE_TOKEN,
    POINTER_LENGTH,
    POINTER_MISSES,
    POINTER_POSITION,
    POINTER_SIZE,
    SHARED,
    STATE_NUM_TOKENS,
    STATE_OUTPUT_START,
    WHOLE,
    Databases,
    Scratch,
)

MAX_MISSES = 8


@fast_inlined
def fill_suffix(databases: Databases, scratch: Scratch, node: int) -> tuple[int, int]:
    """Write the last tokens up to ``node``, newest first, to ``scratch.suffix``.

    Row ``WHOLE`` is that of the whole sequence, row ``SHARED`` that of the part that is comparable
    with other sequences: the output, preceded by ``START``.

    Returns:
        The lengths of both.
    """
    num_tokens = databases.state[STATE_NUM_TOKENS]
    depth = scratch.nodes[node, NODE_DEPTH]
    end = num_tokens + depth
    length = 0
    while node > 0 and length < MAX_SUFFIX:
        scratch.suffix[WHOLE, length] = scratch.nodes[node, NODE_TOKEN]
        node = scratch.nodes[node, NODE_PARENT]
        length += 1
    full = min(MAX_SUFFIX, end)
    while length < full:
        position = np.uint64(end - 1 - length)  # unsigned: a signed index might count from the end
        scratch.suffix[WHOLE, length] = databases.tokens[position]
        length += 1
    num_output = end - databases.state[STATE_OUTPUT_START]
    shared = min(MAX_SUFFIX, num_output + 1)
    for index in range(min(shared, full)):
        scratch.suffix[SHARED, index] = scratch.suffix[WHOLE, index]
    if num_output < MAX_SUFFIX:
        scratch.suffix[SHARED, num_output] = START
    return full, shared


@fast_inlined
def _point(pointers: Ints, first: int, position: int, length: int) -> None:
    """Set the pointer whose fields begin at ``first``."""
    pointers[first + POINTER_POSITION] = position
    pointers[first + POINTER_LENGTH] = length
    pointers[first + POINTER_MISSES] = 0


@fast_inlined
def refresh(
    databases: Databases,
    scratch: Scratch,
    pointers: Ints,
    levels: int,
    num_suffix: int,
    num_shared: int,
) -> None:
    """Set the pointers that are not on a match to the last place with a match.

    A pointer whose level is not in ``levels`` (a bit mask) is never set.
    """
    length = pointers[POINTER_LENGTH]
    if levels & (1 << CONTEXT) and length < MATCH_TOKENS and num_suffix >= MATCH_TOKENS:
        position, length = find_longest(
            databases.tokens,
            databases.places,
            scratch.hashes[WHOLE, MATCH_TOKENS],
            0,
            scratch.suffix[WHOLE],
            num_suffix,
        )
        if position > 0:
            _point(pointers, 0, position, length)
    length = pointers[POINTER_SIZE + POINTER_LENGTH]
    if levels & (1 << MODEL) and length < MATCH_TOKENS and num_shared >= MATCH_TOKENS:
        position, length = find_longest(
            databases.model_log,
            databases.model_places,
            scratch.hashes[SHARED, MATCH_TOKENS],
            databases.model_state[LOG_OLDEST],
            scratch.suffix[SHARED],
            num_shared,
        )
        if position > 0:
            _point(pointers, POINTER_SIZE, position, length)


@fast_inlined
def _own_token(databases: Databases, position: int) -> int:
    """The token at a position of the request's text; -1 for none."""
    if 0 < position < databases.state[STATE_NUM_TOKENS]:
        return np.int64(databases.tokens[position])
    return -1


@fast_inlined
def _logged_token(databases: Databases, position: int) -> int:
    """The token at a position of the model's log; -1 for none."""
    if databases.model_state[LOG_OLDEST] < position < databases.model_state[LOG_END]:
        return np.int64(databases.model_log[position & (databases.model_log.shape[0] - 1)])
    return -1


@fast_inlined
def _token_at(databases: Databases, which: int, position: int) -> int:
    return _own_token(databases, position) if which == 0 else _logged_token(databases, position)


@fast_inlined
def predictions(
    databases: Databases, scratch: Scratch, pointers: Ints, depth: int, num_suffix: int
) -> tuple[int, int]:
    """The tokens both pointers point to; -1 for none."""
    context = -1
    position = pointers[POINTER_POSITION]
    if position > 0:
        end = databases.state[STATE_NUM_TOKENS]
        if position < end:
            context = np.int64(databases.tokens[position])
        else:
            back = end + depth - 1 - position
            if 0 <= back < num_suffix:
                context = np.int64(scratch.suffix[WHOLE, back])
    return context, _logged_token(databases, pointers[POINTER_SIZE + POINTER_POSITION])


@fast_inlined
def advance(databases: Databases, pointers: Ints, predicted: tuple[int, int], token: int) -> None:
    """Move both pointers over ``token``."""
    for which in range(2):
        first = which * POINTER_SIZE
        position, length, misses = (
            first + POINTER_POSITION,
            first + POINTER_LENGTH,
            first + POINTER_MISSES,
        )
        if pointers[position] <= 0:
            continue
        if predicted[which] == token:
            pointers[position] += 1
            pointers[length] = min(pointers[length] + 1, MAX_MATCH)
            if pointers[length] >= 16:
                pointers[misses] = 0
        elif predicted[which] < 0 or pointers[misses] >= MAX_MISSES:
            _point(pointers, first, 0, 0)
        else:
            shift = 1
            if _token_at(databases, which, pointers[position] + 1) == token:
                shift = 2
            elif (
                pointers[misses] > 0
                and _token_at(databases, which, pointers[position] - 1) == token
            ):
                shift = 0
            pointers[position] += shift
            pointers[length] = shift != 1
            pointers[misses] += 1
