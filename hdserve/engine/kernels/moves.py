"""Moving rows of the KV cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.compiled import entry_point
from hdserve.engine.kernels.memory import float_matrices_at
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import load, store

BYTES_AT_ONCE = 4 * NUM_LANES


@entry_point
def move_rows(
    stored_at: int,
    num_matrices: int,
    num_rows: int,
    num_words: int,
    moves: npt.NDArray[np.int64],
    moved: npt.NDArray[np.float32],
) -> None:
    """Copy rows of all matrices at ``stored_at``, as if simultaneously.

    Args:
        num_words: of a row, in units of four bytes, a multiple of the lanes.
        moves: ``[n, 2]``: from which row to which.
        moved: ``[n, num_words]``, scratch.
    """
    stored = float_matrices_at(stored_at, num_matrices, num_rows, num_words)
    for matrix in range(num_matrices):
        for number in range(len(moves)):
            source = moves[number, 0]
            for word in range(0, num_words, NUM_LANES):
                store(moved, (number, word), load(stored, (matrix, source, word)))
        for number in range(len(moves)):
            target = moves[number, 1]
            for word in range(0, num_words, NUM_LANES):
                store(stored, (matrix, target, word), load(moved, (number, word)))
