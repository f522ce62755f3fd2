"""The noise of as many tokens as a vector has lanes."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import VECTOR, vector_type
from hdserve.noise import FIRST_FACTOR, SECOND_FACTOR, SPACING

_WORD = ir.IntType(32)
_WORDS = ir.VectorType(_WORD, NUM_LANES)
_HIGH_BITS: Final = 32


def _all(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * NUM_LANES)


def _repeated(builder: Any, word: Any) -> Any:
    empty = ir.Constant(_WORDS, ir.Undefined)
    first = builder.insert_element(empty, word, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, empty, _all(0))


def _scrambled(builder: Any, words: Any) -> Any:
    words = builder.xor(words, builder.lshr(words, _all(16)))
    words = builder.mul(words, _all(FIRST_FACTOR))
    words = builder.xor(words, builder.lshr(words, _all(13)))
    words = builder.mul(words, _all(SECOND_FACTOR))
    return builder.xor(words, builder.lshr(words, _all(16)))


def _negative_uniforms(typing_context: Any, first: Any, key: Any) -> Any:
    """``-(hdserve.noise.noise_word(key, token) / 2**32)`` of tokens ``first`` and on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low = _repeated(builder, builder.trunc(args[1], _WORD))
        shifted = builder.lshr(args[1], ir.Constant(args[1].type, _HIGH_BITS))
        high = _repeated(builder, builder.trunc(shifted, _WORD))
        lanes = ir.Constant(_WORDS, list(range(NUM_LANES)))
        tokens = builder.add(_repeated(builder, builder.trunc(args[0], _WORD)), lanes)
        words = builder.add(builder.mul(tokens, _all(SPACING)), low)
        words = _scrambled(builder, builder.xor(_scrambled(builder, words), high))
        numbers = builder.uitofp(words, VECTOR)
        return builder.fmul(numbers, ir.Constant(VECTOR, [-(2.0**-32)] * NUM_LANES))

    return vector_type(types.int64, types.int64), codegen


negative_uniforms: Any = intrinsic(_negative_uniforms)
