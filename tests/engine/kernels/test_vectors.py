"""Vectors compute what their numbers would one by one."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdserve.engine.kernels import vectors
from hdserve.engine.kernels.registers import NUM_LANES

Floats = npt.NDArray[np.float32]

NUMBERS = st.lists(
    st.floats(-1e6, 1e6, width=32), min_size=4 * NUM_LANES, max_size=4 * NUM_LANES
).map(lambda numbers: np.array(numbers, np.float32).reshape(4, NUM_LANES))


@numba.njit
def _exponentials(rows: Floats) -> None:
    for row in range(rows.shape[0]):
        vectors.store(rows, (row, 0), vectors.exponential(vectors.load(rows, (row, 0))))


@numba.njit
def _powers_of_two(rows: Floats) -> None:
    for row in range(rows.shape[0]):
        vectors.store(rows, (row, 0), vectors.power_of_two(vectors.load(rows, (row, 0))))


@numba.njit
def _tangents(rows: Floats) -> None:
    for row in range(rows.shape[0]):
        vectors.store(rows, (row, 0), vectors.tanh(vectors.load(rows, (row, 0))))


@numba.njit
def _reduced(rows: Floats, found: Floats) -> None:
    a, b = vectors.load(rows, (0, 0)), vectors.load(rows, (1, 0))
    c, d = vectors.load(rows, (2, 0)), vectors.load(rows, (3, 0))
    vectors.store_totals(found, (0,), a, b, c, d)
    found[4], found[5] = vectors.total(a), vectors.largest(a)
    vectors.store(found, (NUM_LANES,), vectors.fused(a, b, c))


@numba.njit
def _loaded(halves: npt.NDArray[np.uint16], found: Floats) -> None:
    vectors.store(found, (0,), vectors.load(halves, (0,)))


def test_exponentials_are_right_to_the_last_places() -> None:
    """All over the range, and beyond it as at its ends."""
    numbers = np.linspace(-87, 87, 1600 * NUM_LANES, dtype=np.float32)
    found = numbers.reshape(-1, NUM_LANES).copy()
    _exponentials(found)
    wanted = np.exp(numbers.astype(np.float64))
    assert np.abs(found.ravel() / wanted - 1).max() < 2.5e-7
    beyond = np.full((1, NUM_LANES), -1e30, np.float32)
    beyond[0, 1], beyond[0, 2], beyond[0, 3] = -np.inf, 1e30, 0.0
    _exponentials(beyond)
    np.testing.assert_allclose(beyond[0, :4], np.exp([-87.0, -87.0, 87.0, 0.0]), rtol=1e-6)


def test_powers_of_two_are_right_to_the_last_places() -> None:
    numbers = np.linspace(-125, 126, 1600 * NUM_LANES, dtype=np.float32)
    found = numbers.reshape(-1, NUM_LANES).copy()
    _powers_of_two(found)
    assert np.abs(found.ravel() / np.exp2(numbers.astype(np.float64)) - 1).max() < 2.5e-7
    below = np.full((1, NUM_LANES), -1e30, np.float32)
    below[0, 1], below[0, 2] = -np.inf, np.nan
    _powers_of_two(below)
    assert np.isnan(below[0, 2])
    np.testing.assert_allclose(np.delete(below, 2), 2.0**-125, rtol=1e-6)


def test_tangents_are_right() -> None:
    numbers = np.linspace(-100, 100, 1600 * NUM_LANES, dtype=np.float32)
    found = numbers.reshape(-1, NUM_LANES).copy()
    _tangents(found)
    assert np.abs(found.ravel() - np.tanh(numbers.astype(np.float64))).max() < 1e-6


@given(rows=NUMBERS)
def test_sums_are_those_of_all_lanes(rows: Floats) -> None:
    """The totals of four vectors at once have the order of the rows, and every lane counts."""
    found = np.zeros(2 * NUM_LANES, np.float32)
    _reduced(rows, found)
    exact = rows.astype(np.float64)
    tolerance = 1e-6 * np.abs(exact).sum(axis=1) + 1e-30
    assert (np.abs(found[:4] - exact.sum(axis=1)) <= tolerance).all()
    assert abs(found[4] - exact[0].sum()) <= tolerance[0]
    assert found[5] == rows[0].max()
    least = np.finfo(np.float32).smallest_subnormal  # of which half is rounded to nothing
    np.testing.assert_allclose(
        found[NUM_LANES:], exact[0] * exact[1] + exact[2], rtol=1e-6, atol=least
    )


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 3e38, 1e-38, 0.3])
def test_bfloat16_is_read_as_what_it_is(value: float) -> None:
    bits = (np.full(NUM_LANES, value, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = np.zeros(NUM_LANES, np.float32)
    _loaded(bits, found)
    assert (found.view(np.uint32) == bits.astype(np.uint32) << 16).all()
