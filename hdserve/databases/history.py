"""Where the last tokens occurred before: a token log with an index of its positions.

The index answers "after which position did these ``MATCH_TOKENS`` tokens occur last?" with one
look-up; the true length of the match is then counted in the log itself.  A long copy needs no
further look-up: its next token is the next token of the log.

The log is a ring: position ``p`` lies at ``p & (capacity - 1)``, and what is older than one
capacity is forgotten.  Position 0 is never a match, so that 0 means "none" in the index.
"""

from __future__ import annotations

import numpy as np

from hdserve.databases.ngram import (
    HASH_SEED,
    Ints,
    Tokens,
    extend_hash,
    highest_bit,
    inlined,
    jit,
    linear_bucket,
)

MATCH_TOKENS = 5
"""Length of the key of the index: a match shorter than this is not found."""

MAX_MATCH = 32
"""Longest match that is counted."""

LOG_OLDEST, LOG_END, NUM_HEADS = 0, 1, 2
"""Entries of the ``state`` array of a log: valid positions are ``(oldest, end)``."""

_KEY_SHIFT = np.uint64(32)


@inlined
def match_key(log: Tokens, end: int) -> np.uint64:
    """The hash of the ``MATCH_TOKENS`` tokens before ``end`` in a ring log."""
    mask = log.shape[0] - 1
    value = HASH_SEED
    for back in range(1, MATCH_TOKENS + 1):
        value = extend_hash(value, np.int64(log[(end - back) & mask]))
    return value


@inlined
def head_slot(key: np.uint64, num_heads: int) -> int:
    """Where the index keeps the position of a key."""
    return linear_bucket(np.int64(key >> _KEY_SHIFT), num_heads)


@jit
def index_tokens(log: Tokens, heads: Ints, num_heads: int, begin: int, end: int) -> None:
    """Index the positions ``(begin, end]`` of a log; ``begin >= MATCH_TOKENS - 1``."""
    for position in range(begin + 1, end + 1):
        slot = head_slot(match_key(log, position), num_heads)
        heads[slot] = max(heads[slot], position)


@jit
def add_heads(log: Tokens, heads: Ints, num_heads: int, num_added: int) -> None:
    """Bring ``num_added`` more entries of the index into use, see linear hashing in ``ngram``."""
    for added in range(num_heads, num_heads + num_added):
        highest = highest_bit(added)
        position = heads[added - highest]
        heads[added] = 0
        if position > 0 and np.int64(match_key(log, position) >> _KEY_SHIFT) & highest:
            heads[added] = position
            heads[added - highest] = 0


@inlined
def match_length(log: Tokens, position: int, oldest: int, suffix: Tokens, num_suffix: int) -> int:
    """How many tokens before ``position`` of the log equal the suffix, newest first."""
    mask = log.shape[0] - 1
    length = 0
    limit = min(num_suffix, MAX_MATCH, position - oldest)
    while length < limit and log[(position - 1 - length) & mask] == suffix[length]:
        length += 1
    return length
