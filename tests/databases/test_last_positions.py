"""The table of last positions equals a dict, up to tokens that share an entry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve.databases.last_positions import (
    ENTRIES_PER_TOKEN,
    MAX_ENTRIES,
    distance_to,
    new_last_positions,
    note_position,
    note_positions,
)
from hdserve.databases.ngram import MAX_TOKEN_ID
from tests.compiled import called

CAPACITY = 64
TOKENS = st.integers(0, 9) | st.integers(0, MAX_TOKEN_ID)


@given(
    prompt=st.lists(TOKENS, max_size=40),
    output=st.lists(TOKENS, max_size=20),
    asked=st.lists(TOKENS, max_size=10),
)
def test_distances_equal_the_reference(
    prompt: list[int], output: list[int], asked: list[int]
) -> None:
    """Whether tokens come at once or one by one."""
    table = new_last_positions(CAPACITY)
    note_positions(table, np.array(prompt, np.int32), len(prompt))
    for position, token in enumerate(output, len(prompt)):
        called(note_position)(table, token, position)
    text = prompt + output
    last = {token % len(table): position for position, token in enumerate(text)}
    for token in (*text, *asked):
        position = last.get(token % len(table))
        expected = 0 if position is None else len(text) - position
        assert called(distance_to)(table, token, len(text)) == expected


@pytest.mark.parametrize("num_tokens", [64, 1 << 12, 1 << 20])
def test_the_table_is_bounded(num_tokens: int) -> None:
    table = new_last_positions(num_tokens)
    assert len(table) == min(num_tokens * ENTRIES_PER_TOKEN, MAX_ENTRIES)
    assert called(distance_to)(table, MAX_TOKEN_ID, num_tokens) == 0
