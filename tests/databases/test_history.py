"""The copy index finds the last place where the last tokens occurred."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import history
from hdserve.databases.history import MATCH_TOKENS


def _last_match(log: list[int], end: int, key: list[int]) -> int:
    """The last position up to ``end`` that ``key`` stands before, 0 if none."""
    for position in range(end, MATCH_TOKENS - 1, -1):
        if log[position - MATCH_TOKENS : position] == key:
            return position
    return 0


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=MATCH_TOKENS, max_size=200))
def test_index_equals_a_search(tokens: list[int]) -> None:
    """With three different tokens every key collides with itself only."""
    log = np.zeros(256, np.int32)
    log[: len(tokens)] = tokens
    num_heads = 1 << 16
    heads = np.zeros(num_heads, np.int64)
    history.index_tokens(log, heads, num_heads, MATCH_TOKENS - 1, len(tokens))
    for end in range(MATCH_TOKENS, len(tokens) + 1):
        slot = history.head_slot(np.uint64(history.match_key(log, end)), num_heads)
        expected = _last_match(tokens, len(tokens), tokens[end - MATCH_TOKENS : end])
        assert heads[slot] == expected


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=40, max_size=200))
def test_growing_the_index_keeps_it_valid(tokens: list[int]) -> None:
    """After entries are added one by one each still leads to a true match."""
    log = np.zeros(256, np.int32)
    log[: len(tokens)] = tokens
    heads = np.zeros(256, np.int64)
    history.index_tokens(log, heads, 16, MATCH_TOKENS - 1, len(tokens))
    history.add_heads(log, heads, 16, 100)
    kept = [position for position in heads[:116].tolist() if position]
    assert kept
    for position in kept:
        slot = history.head_slot(np.uint64(history.match_key(log, position)), 116)
        assert heads[slot] == position


def test_match_length_counts_backwards_over_the_ring() -> None:
    """A match that crosses the end of the ring is counted in full, and stops at the oldest."""
    log = np.array([5, 6, 7, 0, 1, 2, 3, 4], np.int32)
    suffix = np.array([7, 6, 5, 4, 3, 9], np.int32)
    assert history.match_length(log, 11, 3, suffix, 6) == 5
    assert history.match_length(log, 11, 9, suffix, 6) == 2
