"""The noise of one vector of tokens."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import (
    INTEGERS,
    VECTOR,
    in_all_lanes,
    integers,
    vector_type,
)
from hdserve.noise import FIRST_FACTOR, SECOND_FACTOR, SPACING

_WORD = ir.IntType(32)
_HIGH_BITS: Final = 32


def _scrambled(builder: Any, words: Any) -> Any:
    words = builder.xor(words, builder.lshr(words, integers(16)))
    words = builder.mul(words, integers(FIRST_FACTOR))
    words = builder.xor(words, builder.lshr(words, integers(13)))
    words = builder.mul(words, integers(SECOND_FACTOR))
    return builder.xor(words, builder.lshr(words, integers(16)))


def _negative_uniforms(typing_context: Any, first: Any, key: Any) -> Any:
    """``-(hdserve.noise.noise_word(key, token) / 2**32)`` of consecutive tokens from ``first``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = in_all_lanes(builder, builder.trunc(args[1], _WORD))
        shifted = builder.lshr(args[1], ir.Constant(args[1].type, _HIGH_BITS))
        high = in_all_lanes(builder, builder.trunc(shifted, _WORD))
        lanes = ir.Constant(INTEGERS, list(range(NUM_LANES)))
        tokens = builder.add(in_all_lanes(builder, builder.trunc(args[0], _WORD)), lanes)
        words = builder.add(builder.mul(tokens, integers(SPACING)), low)
        words = _scrambled(builder, builder.xor(_scrambled(builder, words), high))
        numbers = builder.uitofp(words, VECTOR)
        return builder.fmul(numbers, ir.Constant(VECTOR, [-(2.0**-32)] * NUM_LANES))

    return vector_type(types.int64, types.int64), codegen


negative_uniforms: Any = intrinsic(_negative_uniforms)
