"""How large a step is."""

from __future__ import annotations

import numpy as np
import pytest

from hdserve.drafting.arrays import CONTEXT, MODEL, POINTER_SIZE, STATISTICS
from hdserve.drafting.learning import LONG_COPY, step_size
from tests.compiled import called

WITHOUT = 1 << CONTEXT | 1 << MODEL
WITH = WITHOUT | 1 << STATISTICS


@pytest.mark.parametrize("which", [CONTEXT, MODEL])
@pytest.mark.parametrize(
    ("levels", "length", "wanted"),
    [
        (WITHOUT, 0, 0.002),
        (WITHOUT, LONG_COPY, 0.002),
        (WITH, 0, 0.001),
        (WITH, LONG_COPY - 1, 0.001),
        (WITH, LONG_COPY, 0.002),
    ],
)
def test_steps_are_smaller_where_there_are_statistics(
    which: int, levels: int, length: int, wanted: float
) -> None:
    """But along a copy, of the request's own text or of what was generated before."""
    pointers = np.zeros(2 * POINTER_SIZE, np.int64)
    pointers[which * POINTER_SIZE + 1] = length
    assert called(step_size)(0.002, levels, pointers) == wanted
