"""Choosing among compiled functions."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from hdserve.engine.kernels.blocks import chosen
from hdserve.engine.kernels.compiled import inlined


def _times(factor: int) -> Any:
    @inlined
    def multiply(given: Any) -> None:
        numbers, addend = given
        numbers[0] = factor * numbers[0] + addend

    return multiply


_multiply = chosen({number: _times(number) for number in (2, 3, 5)})


@numba.njit
def _call(number: int, numbers: Any) -> None:
    _multiply(number, (numbers, 0.5))


@pytest.mark.parametrize(("number", "factor"), [(2, 2), (3, 3), (5, 5), (4, 5), (-1, 5)])
def test_one_of_several_functions_is_called(number: int, factor: int) -> None:
    numbers = np.ones(1)
    _call(number, numbers)
    assert numbers[0] == factor + 0.5
