"""The kernels as functions of C, for code that is not Python's to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import numba
from numba.core.ccallback import CFunc

from hdserve.databases.kernel_cache import KernelCache
from hdserve.engine.kernels.attention import attend
from hdserve.engine.kernels.compiled import OPTIONS
from hdserve.engine.kernels.linear import multiply_at
from hdserve.engine.kernels.memory import integers_at
from hdserve.engine.kernels.pair_linear import multiply_pairs_at
from hdserve.engine.kernels.registers import HAS_AVX512

_I, _D = numba.int64, numba.float64
_NUM_STORED: Final = 6
_NUM_LISTED: Final = 6


def multiply_callback() -> CFunc[Callable[..., None]]:
    """:func:`~hdserve.engine.kernels.linear.multiply_at`, all of its arguments ``int64_t``."""
    return _callback(_multiply, numba.void(*[_I] * 9))


def multiply_pairs_callback() -> CFunc[Callable[..., None]]:
    """:func:`~hdserve.engine.kernels.pair_linear.multiply_pairs_at`, for processors that have such
    products; all of its arguments ``int64_t``."""
    return _callback(_multiply_pairs, numba.void(*[_I] * 9))


def attend_callback() -> CFunc[Callable[..., None]]:
    """:func:`~hdserve.engine.kernels.attention.attend`, its arrays by address; its arguments
    ``int64_t``, scale and softcap ``double``."""
    return _callback(_attend, numba.void(*[_I] * 8, _D, _D, *[_I] * 3))


def _callback(function: Callable[..., None], signature: Any) -> CFunc[Callable[..., None]]:
    types = signature.args, signature.return_type
    made = CFunc(function, types, locals={}, options={"nopython": True, **OPTIONS})
    cast("Any", made)._cache = KernelCache(function, takes_baseline=not HAS_AVX512)
    made.compile()
    return made


def _multiply(
    rows_at: int,
    weights_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    is_bfloat16: int,
    first: int,
    stop: int,
) -> None:
    sizes = num_rows, num_inputs, num_outputs
    multiply_at(rows_at, weights_at, products_at, *sizes, is_bfloat16 != 0, first, stop)


def _multiply_pairs(
    rows_at: int,
    weights_at: int,
    bias_at: int,
    products_at: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    first: int,
    stop: int,
) -> None:
    sizes = num_rows, num_inputs, num_outputs
    multiply_pairs_at(rows_at, weights_at, bias_at, products_at, *sizes, first, stop)


def _attend(
    stored_at: int,
    listed_at: int,
    queries_at: int,
    attended_at: int,
    num_heads: int,
    scores_at: int,
    scores_size: int,
    is_bfloat16: int,
    scale: float,
    softcap: float,
    window: int,
    first_item: int,
    stop_item: int,
) -> None:
    attend(
        integers_at(stored_at, 1, _NUM_STORED)[0],
        integers_at(listed_at, 1, _NUM_LISTED)[0],
        queries_at,
        attended_at,
        num_heads,
        scores_at,
        scores_size,
        is_bfloat16 != 0,
        scale,
        softcap,
        window,
        first_item,
        stop_item,
    )
