"""The copy index finds the last place where the last tokens occurred."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.databases import history
from hdserve.databases.history import (
    MATCH_TOKENS,
    PLACES_PER_BUCKET,
    PLACES_PER_KEY,
    new_places,
)
from hdserve.databases.ngram import Ints
from tests.compiled import called


def _last_matches(log: list[int], key: list[int]) -> list[int]:
    """The positions that ``key`` stands before, the last first."""
    ends = range(len(log), MATCH_TOKENS - 1, -1)
    return [end for end in ends if log[end - MATCH_TOKENS : end] == key]


def _length(log: list[int], position: int, end: int) -> int:
    """How many tokens before both are equal, as far as they are counted."""
    limit = min(position, end, history.MAX_MATCH)
    same = (log[position - 1 - back] == log[end - 1 - back] for back in range(limit))
    return len(list(itertools.takewhile(bool, same)))


def _found(log: npt.NDArray[np.int32], places: Ints, end: int) -> int:
    """Where the tokens before ``end`` stood with as many equal ones before them as possible."""
    key = np.uint64(called(history.match_key)(log, end))
    suffix = log[end - 1 :: -1][: min(end, history.MAX_MATCH)].copy()
    position, length = called(history.find_longest)(log, places, key, 0, suffix, len(suffix))
    assert (
        length == called(history.match_length)(log, position, 0, suffix, len(suffix))
        or not position
    )
    return int(position)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=MATCH_TOKENS, max_size=200))
def test_index_equals_a_search(tokens: list[int]) -> None:
    """While there is room, each end leads to the longest match among the last positions of its
    key, of equals to the last one."""
    log = np.zeros(256, np.int32)
    log[: len(tokens)] = tokens
    places = new_places(1 << 14)
    history.index_tokens(log, places, MATCH_TOKENS - 1, len(tokens))
    for end in range(MATCH_TOKENS, len(tokens) + 1):
        last = _last_matches(tokens, tokens[end - MATCH_TOKENS : end])[:PLACES_PER_KEY]
        expected = max(last, key=lambda position: (_length(tokens, position, end), position))
        assert _found(log, places, end) == expected


def _positions(places: Ints) -> list[int]:
    """What a single bucket holds."""
    return sorted(int(entry) & ((1 << 40) - 1) for entry in places if entry)


def test_a_full_bucket_gives_up_its_oldest_position() -> None:
    """Nine keys in one bucket: the first position is gone, and does not come back."""
    places = np.zeros(PLACES_PER_BUCKET, np.int64)
    for number in range(9):
        called(history.note_place)(places, np.uint64(number), 100 + number)
    assert _positions(places) == [*range(101, 109)]
    called(history.note_place)(places, np.uint64(0), 50)
    assert _positions(places) == [*range(101, 109)]


def test_of_a_key_the_last_positions_are_kept() -> None:
    """Whatever the order they come in, and others keep theirs."""
    places = np.zeros(PLACES_PER_BUCKET, np.int64)
    called(history.note_place)(places, np.uint64(1), 7)
    for position in (50, 10, 60, 20, 70, 40):
        called(history.note_place)(places, np.uint64(2), position)
    assert _positions(places) == [7, 50, 60, 70]


def test_old_text_is_found_as_well_as_new_text() -> None:
    """A full log without repetition: hardly an entry is gone, not even of the oldest text."""
    num_tokens = 1 << 16
    log = np.random.default_rng(0).permutation(1 << 20)[:num_tokens].astype(np.int32)
    places = new_places(num_tokens)
    history.index_tokens(log, places, MATCH_TOKENS - 1, num_tokens - 1)
    for first in range(MATCH_TOKENS, num_tokens, num_tokens // 8):
        ends = range(first, min(first + num_tokens // 8, num_tokens))
        found = [_found(log, places, end) for end in ends]
        assert set(found) <= {0, *ends}
        assert np.mean(np.array(found) > 0) > 0.96, first


def test_match_length_counts_backwards_over_the_ring() -> None:
    """A match that crosses the end of the ring is counted in full, and stops at the oldest."""
    log = np.array([5, 6, 7, 0, 1, 2, 3, 4], np.int32)
    suffix = np.array([7, 6, 5, 4, 3, 9], np.int32)
    assert called(history.match_length)(log, 11, 3, suffix, 6) == 5
    assert called(history.match_length)(log, 11, 9, suffix, 6) == 2
