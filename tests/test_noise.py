"""The noise is a function of its inputs, uniform over each of them, and the same wherever it is
computed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve.engine.kernels.compiled import entry_point
from hdserve.engine.kernels.memory import floats_at
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.uniforms import negative_uniforms
from hdserve.engine.kernels.vectors import store
from hdserve.noise import exponential, noise_word, position_key, sequence_key
from tests.goodness import chi_square_p_value

MIN_P_VALUE = 1e-4
NUM_VALUES = 30_000
KEYS = st.integers(0, 2**63 - 1)
FIRST = {"seed": 7, "choice_index": 1, "position": 2, "token_id": 3}


def word(seed: int, choice_index: int, position: int, token_id: int) -> int:
    return noise_word(position_key(sequence_key(seed, choice_index), position), token_id)


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice_index=st.integers(0, 63),
    position=st.integers(0, 2**31),
    token_id=st.integers(0, 2**20),
)
def test_it_repeats_and_stays_in_range(**numbers: int) -> None:
    """Keys are of 63 bits, words of 32; a time is above 0 and finite."""
    found = word(**numbers)
    assert 0 <= found < 2**32
    assert found == word(**numbers)
    assert 0 <= sequence_key(numbers["seed"], numbers["choice_index"]) < 2**63


@pytest.mark.parametrize("varied", FIRST)
def test_it_is_uniform_over_each_input(varied: str) -> None:
    """And neighbours are independent."""
    words = [word(**{**FIRST, varied: number}) for number in range(NUM_VALUES)]
    assert len(set(words)) > NUM_VALUES - 10
    for shift in (26, 0):
        parts = [(found >> shift) % 64 for found in words]
        counts = np.bincount(parts, minlength=64).tolist()
        assert chi_square_p_value(counts, [1.0] * 64) > MIN_P_VALUE
    eighths = [found >> 29 for found in words]
    pairs = [8 * a + b for a, b in itertools.pairwise(eighths)][::2]
    counts = np.bincount(pairs, minlength=64).tolist()
    assert chi_square_p_value(counts, [1.0] * 64) > MIN_P_VALUE


@pytest.mark.parametrize("distance", [1, 2, 16, 1000])
def test_tokens_are_independent_of_each_other(distance: int) -> None:
    """Which of two arrives first says nothing of them at the next position."""
    keys = [position_key(sequence_key(5, 0), position) for position in range(NUM_VALUES)]
    first = [noise_word(key, 100) < noise_word(key, 100 + distance) for key in keys]
    counts = np.bincount([2 * a + b for a, b in itertools.pairwise(first)][::2], minlength=4)
    assert chi_square_p_value(counts.tolist(), [1.0] * 4) > MIN_P_VALUE


def test_times_are_exponentially_distributed() -> None:
    """Of mean 1; the extremes are finite."""
    assert exponential(0) == pytest.approx(2.0**-33)
    assert exponential(2**32 - 1) == pytest.approx(33 * math.log(2))
    times = [exponential(word(**{**FIRST, "token_id": token})) for token in range(NUM_VALUES)]
    sixteenths = [int(16 * math.exp(-time)) for time in times]
    counts = np.bincount(sixteenths, minlength=16).tolist()
    assert chi_square_p_value(counts, [1.0] * 16) > MIN_P_VALUE


def test_it_stays_the_same_for_ever() -> None:
    """A seed gives the same answer in every version and on every machine."""
    assert sequence_key(7, 1) == 1424622062653717601
    assert word(**FIRST) == 3521505890
    assert sequence_key(-1, 3) == sequence_key(2**64 - 1, 3)


@pytest.mark.parametrize("seed", [np.int64(-5), np.int32(7), np.uint64(2**64 - 1)])
def test_seeds_of_numpy(seed: Any) -> None:
    """A seed that numpy drew is the number it stands for."""
    assert sequence_key(seed, 0) == sequence_key(int(seed), 0)


@numba.njit  # type: ignore[untyped-decorator]
def compiled_word(key: int, position: int, token_id: int) -> int:
    return noise_word(position_key(key, position), token_id)


@entry_point
def store_uniforms(found_at: int, first: int, key: int) -> None:
    store(floats_at(found_at, 1, NUM_LANES), (0, 0), negative_uniforms(first, key))


@given(key=KEYS, position=st.integers(0, 2**31), token_id=st.integers(0, 2**20))
def test_compiled_code_finds_the_same(key: int, position: int, token_id: int) -> None:
    """One number at a time, and as many as a vector has lanes, which are rounded."""
    key_there = position_key(key, position)
    assert compiled_word(key, position, token_id) == noise_word(key_there, token_id)
    found = torch.zeros(NUM_LANES)
    store_uniforms(found.data_ptr(), token_id, key_there)
    words = [noise_word(key_there, token_id + lane) for lane in range(NUM_LANES)]
    np.testing.assert_allclose(-found.numpy(), np.array(words) / 2**32, rtol=1e-6)


@given(key=KEYS, position=st.integers(0, 2**31), first=st.integers(0, 2**20))
def test_tensors_are_as_good_as_integers(key: int, position: int, first: int) -> None:
    """The words of many tokens and keys at once are those of each; what they are made of stays."""
    keys = [position_key(key, position), 2**63 - 1]
    rows, columns = torch.tensor(keys)[:, None], torch.arange(first, first + 3)
    word: Any = noise_word
    wanted = [[noise_word(each, first + n) for n in range(3)] for each in keys]
    assert word(rows, columns).tolist() == wanted
    assert (rows[:, 0].tolist(), columns.tolist()) == (keys, [first, first + 1, first + 2])
