"""Matrices are transposed where they lie among others."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.transpose import store_transposed

SIZE = 3 * NUM_LANES


@numba.njit
def _transpose(source: npt.NDArray[np.uint16], target: npt.NDArray[np.float32]) -> None:
    store_transposed(source, (1, 5, 2 * NUM_LANES), target, (3, NUM_LANES))


def test_a_square_of_words_is_transposed() -> None:
    """Read as pairs of 16 bits, from a row that is not the first, and nothing beside it is
    touched."""
    words = np.arange(2 * SIZE * SIZE, dtype=np.uint32).reshape(2, SIZE, SIZE)
    target = np.zeros((SIZE, SIZE), np.uint32)
    _transpose(words.view(np.uint16), target.view(np.float32))
    wanted = np.zeros_like(target)
    square = words[1, 5 : 5 + NUM_LANES, NUM_LANES : 2 * NUM_LANES]
    wanted[3 : 3 + NUM_LANES, NUM_LANES : 2 * NUM_LANES] = square.T
    assert np.array_equal(target, wanted)
