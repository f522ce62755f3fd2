"""Where the last tokens occurred before: a token log with an index of its positions.

The index answers "what is the last position after these ``MATCH_TOKENS`` tokens?" with one look-up;
the true length of the match is then counted in the log itself.  A long copy needs no further
look-up: its next token is the next token of the log.

The index is a hash table of buckets of one cache line, eight entries filled from the front::

    bits   62 .. 40   39 .. 0
           tag        position          an empty entry is 0

A full bucket gives up its oldest position.  With two places for each token the oldest eighth of a
full log without repetitions keeps 96 % of its entries, the newer half all of them
(``tests/databases/test_history.py``).

The log is a ring: position ``p`` is stored at ``p & (capacity - 1)``, and anything older than one
capacity is forgotten.  Position 0 is never a match, so that 0 means "none" in the index.
"""

from __future__ import annotations

import numpy as np

from hdserve.databases.cache_lines import new_lines, prefetch_line
from hdserve.databases.compiled import fast_inlined, jit
from hdserve.databases.ngram import HASH_SEED, PREFETCH_DISTANCE, Ints, Tokens, extend_hash

MATCH_TOKENS = 5
"""Length of the key of the index: a match shorter than this is not found."""

MAX_MATCH = 32
"""Longest match that is counted."""

PLACES_PER_BUCKET = 8
PLACES_PER_TOKEN = 2
PLACES_PER_KEY = 3

LOG_OLDEST, LOG_END = 0, 1
"""Entries of the ``state`` array of a log: valid positions are ``(oldest, end)``."""

_KEY_SHIFT = np.uint64(32)
_TAG_SHIFT = 40
_TAG_MASK = np.uint64((1 << 23) - 1)
_POSITION_MASK = (1 << _TAG_SHIFT) - 1


def new_places(num_tokens: int) -> Ints:
    """An empty index for ``num_tokens`` positions, a power of two: ``int64[2 * num_tokens]``."""
    num_buckets = num_tokens * PLACES_PER_TOKEN // PLACES_PER_BUCKET
    return new_lines(num_buckets).view(np.int64).reshape(-1)


@fast_inlined
def match_key(log: Tokens, end: int) -> np.uint64:
    """The hash of the ``MATCH_TOKENS`` tokens before ``end`` in a ring log."""
    mask = log.shape[0] - 1
    value = HASH_SEED
    for back in range(1, MATCH_TOKENS + 1):
        value = extend_hash(value, np.int64(log[(end - back) & mask]))
    return value


@fast_inlined
def _bucket(places: Ints, key: np.uint64) -> int:
    """The first place of the bucket of a key."""
    return np.int64(key >> _KEY_SHIFT) * PLACES_PER_BUCKET & (places.shape[0] - 1)


@fast_inlined
def _tag(key: np.uint64) -> int:
    """The bits of a key that an entry holds, to tell it from other keys of its bucket."""
    return np.int64(key & _TAG_MASK) << _TAG_SHIFT


@fast_inlined
def note_place(places: Ints, key: np.uint64, position: int) -> None:
    """Note that a key ends before ``position``.  The last ``PLACES_PER_KEY`` positions of a key are
    kept, and as many of the last positions of a bucket as fit."""
    first, tag = _bucket(places, key), _tag(key)
    num_same, oldest, oldest_same = 0, first, first
    for place in range(first, first + PLACES_PER_BUCKET):
        entry = places[place]
        if entry == 0:
            oldest = place
            break
        known = entry & _POSITION_MASK
        if known < places[oldest] & _POSITION_MASK:
            oldest = place
        if entry & ~_POSITION_MASK == tag:
            if num_same == 0 or known < places[oldest_same] & _POSITION_MASK:
                oldest_same = place
            num_same += 1
    chosen = oldest_same if num_same == PLACES_PER_KEY else oldest
    if position > places[chosen] & _POSITION_MASK:
        places[chosen] = tag | position


@fast_inlined
def _index(log: Tokens, places: Ints, begin: int, end: int) -> None:
    for position in range(begin + 1, end + 1):
        ahead = min(position + PREFETCH_DISTANCE, end)
        prefetch_line(places, _bucket(places, match_key(log, ahead)))
        note_place(places, match_key(log, position), position)


@jit
def index_tokens(log: Tokens, places: Ints, begin: int, end: int) -> None:
    """Index the positions ``(begin, end]`` of a log; ``begin >= MATCH_TOKENS - 1``."""
    _index(log, places, begin, end)


@jit
def append_tokens(log: Tokens, places: Ints, state: Ints, tokens: Tokens) -> None:
    """Append ``tokens``, which must fit, to a log, forget what they overwrite, and index their
    positions."""
    begin, mask = state[LOG_END], log.shape[0] - 1
    for index in range(tokens.shape[0]):
        log[(begin + index) & mask] = tokens[index]
    end = begin + tokens.shape[0]
    state[LOG_END] = end
    state[LOG_OLDEST] = max(state[LOG_OLDEST], end - log.shape[0])
    _index(log, places, max(begin, MATCH_TOKENS), end)


@fast_inlined
def prefetch_places(places: Ints, key: np.uint64) -> None:
    """Prefetch what :func:`find_longest` will read."""
    prefetch_line(places, _bucket(places, key))


@fast_inlined
def match_length(log: Tokens, position: int, oldest: int, suffix: Tokens, num_suffix: int) -> int:
    """How many tokens before ``position`` of the log equal the suffix, newest first."""
    mask = log.shape[0] - 1
    length = 0
    limit = min(num_suffix, MAX_MATCH, position - oldest)
    while length < limit and log[(position - 1 - length) & mask] == suffix[length]:
        length += 1
    return length


@fast_inlined
def find_longest(
    log: Tokens, places: Ints, key: np.uint64, oldest: int, suffix: Tokens, num_suffix: int
) -> tuple[int, int]:
    """Find the position of a key with the longest match before it; of several, the last.

    Returns:
        The position and the length of the match; zeros if none is ``MATCH_TOKENS`` long.
    """
    first, tag = _bucket(places, key), _tag(key)
    found, longest = 0, MATCH_TOKENS - 1
    for place in range(first, first + PLACES_PER_BUCKET):
        entry = places[place]
        if entry == 0:
            break
        position = entry & _POSITION_MASK
        if entry & ~_POSITION_MASK == tag and position > oldest:
            length = match_length(log, position, oldest, suffix, num_suffix)
            if length > longest or (length == longest and position > found):
                found, longest = position, length
    return found, longest if found > 0 else 0
