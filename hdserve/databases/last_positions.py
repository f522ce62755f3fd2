"""The last position of each token in a text.

A table of positions by token: if two tokens share an entry, one may seem to be where the other
is.
"""

from __future__ import annotations

import numpy as np

from hdserve.databases.compiled import fast_inlined, jit
from hdserve.databases.ngram import Tokens

ENTRIES_PER_TOKEN = 8
MAX_ENTRIES = 1 << 15


def new_last_positions(num_tokens: int) -> Tokens:
    """An empty table for a text of ``num_tokens`` tokens, a power of two: ``int32[n]``, ``n`` a
    power of two.  An entry is the position of a token plus one, 0 for none."""
    return np.zeros(min(MAX_ENTRIES, num_tokens * ENTRIES_PER_TOKEN), np.int32)


@fast_inlined
def note_position(last_positions: Tokens, token: int, position: int) -> None:
    """Note that ``token`` is at ``position``."""
    last_positions[np.uint64(token & (last_positions.shape[0] - 1))] = position + 1


@fast_inlined
def distance_to(last_positions: Tokens, token: int, end: int) -> int:
    """How far before ``end`` the token occurs last, at least 1; 0 if nowhere."""
    after = np.int64(last_positions[np.uint64(token & (last_positions.shape[0] - 1))])
    return end + 1 - after if after > 0 else 0


@jit
def note_positions(last_positions: Tokens, tokens: Tokens, num_tokens: int) -> None:
    """Note the positions of the first ``num_tokens`` tokens of a text."""
    for position in range(num_tokens):
        note_position(last_positions, np.int64(tokens[position]), position)
