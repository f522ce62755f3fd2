"""Vectors of float32, as values that compiled functions compute with.

What a loop over numbers is compiled to, and so in which order it adds them, is up to the compiler.
These operations fix it: products are fused into sums, and sums add in a fixed order, so the same
numbers give the same bits in whatever loop they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model
from numpy.polynomial import Chebyshev, Polynomial

from hdserve.engine.kernels.compiled import inlined
from hdserve.engine.kernels.registers import NUM_LANES

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
VECTOR = ir.VectorType(_FLOAT, NUM_LANES)
INTEGERS = ir.VectorType(_INT32, NUM_LANES)
_EXPONENT_SHIFT = 23
_NUM_TOTALS = 4
BFLOAT16_SHIFT = 16
_HIGH_HALF = 0xFFFF0000
_BELOW_HALF = 0x7FFF
_NAN = 0x7FC00000


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{NUM_LANES}")


vector_type: Final = _VectorType()


@register_model(_VectorType)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)  # type: ignore[no-untyped-call]


def integers(value: int) -> Any:
    """The constant in all lanes, of 32 bits, for the code of intrinsics."""
    return ir.Constant(INTEGERS, [value] * NUM_LANES)


def in_all_lanes(builder: Any, number: Any) -> Any:
    """A number of 32 bits in all lanes, for the code of intrinsics."""
    empty = ir.Constant(ir.VectorType(number.type, NUM_LANES), ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, empty, integers(0))


def call_llvm(builder: Any, name: str, *vectors: Any) -> Any:
    """A call of one of LLVM's own functions on vectors, for the code of intrinsics."""
    function_type = ir.FunctionType(VECTOR, [VECTOR] * len(vectors))
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, f"llvm.{name}.v{NUM_LANES}f32"
    )
    return builder.call(function, vectors)


def pointer_to(context: Any, builder: Any, kind: Any, value: Any, indices: Any) -> Any:
    """The address of an item of an array, for the code of intrinsics."""
    array = context.make_array(kind)(context, builder, value)
    found = cgutils.unpack_tuple(builder, indices)  # type: ignore[no-untyped-call]
    return cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
        context, builder, kind, array, found, wraparound=False
    )


def _load(typing_context: Any, array: Any, indices: Any) -> Any:
    """Items of C-contiguous ``array`` from ``indices``: float32, or bfloat16 as uint16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], *args)
        if array.dtype == types.float32:
            return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), align=4)
        halves = ir.VectorType(ir.IntType(16), NUM_LANES)
        upper = builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2)
        words = builder.shl(builder.zext(upper, INTEGERS), integers(BFLOAT16_SHIFT))
        return builder.bitcast(words, VECTOR)

    return vector_type(array, indices), codegen


def _half_of_words(*, is_high: bool) -> Callable[..., Any]:
    """Loads the bfloat16 in the low or high halves of uint32 of C-contiguous ``array``."""

    def load_half(typing_context: Any, array: Any, indices: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = pointer_to(context, builder, signature.args[0], *args)
            words = builder.load(builder.bitcast(pointer, INTEGERS.as_pointer()), align=4)
            if is_high:
                words = builder.and_(words, integers(_HIGH_HALF))
            else:
                words = builder.shl(words, integers(BFLOAT16_SHIFT))
            return builder.bitcast(words, VECTOR)

        return vector_type(array, indices), codegen

    return load_half


def _store_rounded_halves(typing_context: Any, array: Any, indices: Any, value: Any) -> Any:
    """Write a vector, rounded to bfloat16, to ``array`` of uint16 from ``indices`` on.

    It rounds to the nearest, to an even one between two; a NaN stays one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        words = builder.bitcast(args[2], INTEGERS)
        shift = integers(BFLOAT16_SHIFT)
        is_odd = builder.and_(builder.lshr(words, shift), integers(1))
        rounded = builder.add(builder.add(words, integers(_BELOW_HALF)), is_odd)
        is_nan = builder.fcmp_unordered("uno", args[2], args[2])
        found = builder.lshr(builder.select(is_nan, integers(_NAN), rounded), shift)
        halves = ir.VectorType(ir.IntType(16), NUM_LANES)
        found = builder.trunc(found, halves)
        builder.store(found, builder.bitcast(pointer, halves.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, indices, value), codegen


def _item(typing_context: Any, array: Any, indices: Any) -> Any:
    """One item, as :func:`_load` has it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(pointer_to(context, builder, signature.args[0], *args))
        if array.dtype == types.float32:
            return found
        word = builder.shl(builder.zext(found, _INT32), ir.Constant(_INT32, BFLOAT16_SHIFT))
        return builder.bitcast(word, _FLOAT)

    return types.float32(array, indices), codegen


def _store(typing_context: Any, array: Any, indices: Any, value: Any) -> Any:
    """Write a vector to ``array`` from ``indices`` on, whatever its dtype."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, args[2].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, indices, value), codegen


def _prefetch(typing_context: Any, array: Any, indices: Any) -> Any:
    """Prefetch the cache line of an item."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        pointer = builder.bitcast(pointer_to(context, builder, signature.args[0], *args), byte)
        function_type = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, "llvm.prefetch.p0"
        )
        reading, kept, data = (ir.Constant(_INT32, value) for value in (0, 3, 1))
        builder.call(function, [pointer, reading, kept, data])
        return context.get_dummy_value()

    return types.void(array, indices), codegen


def _spread(typing_context: Any, number: Any) -> Any:
    """``number`` in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return in_all_lanes(builder, args[0])

    return vector_type(types.float32), codegen


def _elementwise(operation: Callable[..., Any], num_arguments: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return operation(builder, *args)

    kinds = [vector_type] * num_arguments
    if num_arguments == 1:
        return lambda _context, _a: (vector_type(*kinds), codegen)
    if num_arguments == 2:
        return lambda _context, _a, _b: (vector_type(*kinds), codegen)
    return lambda _context, _a, _b, _c: (vector_type(*kinds), codegen)


def _named(name: str, num_arguments: int) -> Any:
    return _elementwise(lambda builder, *vectors: call_llvm(builder, name, *vectors), num_arguments)


def _chosen(builder: Any, relation: str, a: Any, b: Any) -> Any:
    """One instruction; LLVM's own functions, which never give NaN, take three."""
    return builder.select(builder.fcmp_ordered(relation, a, b), a, b)


def _times_power_of_two(builder: Any, number: Any, shifted: Any) -> Any:
    """``number * 2 ** n`` for the whole ``n`` that was added to :data:`_SHIFT`, as long as the
    result is within the exponent range of a float32."""
    exponent = builder.shl(builder.bitcast(shifted, INTEGERS), integers(_EXPONENT_SHIFT))
    return builder.bitcast(builder.add(builder.bitcast(number, INTEGERS), exponent), VECTOR)


def _halves_added(builder: Any, vector: Any, width: int) -> Any:
    """The first ``width / 2`` lanes added to the rest, of a vector of ``width``."""
    half = width // 2
    undefined = ir.Constant(vector.type, ir.Undefined)

    def part(start: int) -> Any:
        lanes = ir.VectorType(_INT32, half)
        mask = ir.Constant(lanes, list(range(start, start + half)))
        return builder.shuffle_vector(vector, undefined, mask)

    return builder.fadd(part(0), part(half))


def _total(typing_context: Any, vector: Any) -> Any:
    """The sum of the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, width = args[0], NUM_LANES
        while width > 1:
            found = _halves_added(builder, found, width)
            width //= 2
        return builder.extract_element(found, ir.Constant(_INT32, 0))

    return types.float32(vector), codegen


def _largest(typing_context: Any, vector: Any) -> Any:
    """The largest of the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_FLOAT, [VECTOR])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, f"llvm.vector.reduce.fmax.v{NUM_LANES}f32"
        )
        return builder.call(function, [args[0]], fastmath=("nnan", "nsz"))

    return types.float32(vector), codegen


def _any_reaches(typing_context: Any, vector: Any, limits: Any) -> Any:
    """Whether a lane of ``vector`` is at least that of ``limits``; NaN is not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        reached = builder.fcmp_ordered(">=", *args)
        bits = builder.bitcast(reached, ir.IntType(NUM_LANES))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(vector, limits), codegen


def _interleaved_sum(builder: Any, first: Any, second: Any, width: int) -> Any:
    """Neighbouring groups of ``width`` lanes added, of ``first`` and ``second`` in turn."""
    low, high = [], []
    for group in range(0, NUM_LANES, 2 * width):
        for offset in (0, NUM_LANES):
            low += [offset + group + lane for lane in range(width)]
            high += [offset + group + width + lane for lane in range(width)]
    lows = builder.shuffle_vector(first, second, ir.Constant(INTEGERS, low))
    highs = builder.shuffle_vector(first, second, ir.Constant(INTEGERS, high))
    return builder.fadd(lows, highs)


def four_totals(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of four vectors, as one of four, for the code of intrinsics."""
    first, second = _interleaved_sum(builder, a, b, 1), _interleaved_sum(builder, c, d, 1)
    found, width = _interleaved_sum(builder, first, second, 2), NUM_LANES
    while width > _NUM_TOTALS:
        found = _halves_added(builder, found, width)
        width //= 2
    return found


def _store_totals(
    typing_context: Any, array: Any, indices: Any, a: Any, b: Any, c: Any, d: Any
) -> Any:
    """``array[indices : + 4] =`` the sums of ``a``, ``b``, ``c`` and ``d``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        sums = four_totals(builder, *args[2:6])
        builder.store(sums, builder.bitcast(pointer, sums.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, indices, a, b, c, d), codegen


load: Any = intrinsic(_load)
load_low_halves: Any = intrinsic(_half_of_words(is_high=False))
load_high_halves: Any = intrinsic(_half_of_words(is_high=True))
item: Any = intrinsic(_item)
store: Any = intrinsic(_store)
store_rounded_halves: Any = intrinsic(_store_rounded_halves)
prefetch: Any = intrinsic(_prefetch)
spread: Any = intrinsic(_spread)
total: Any = intrinsic(_total)
largest: Any = intrinsic(_largest)
any_reaches: Any = intrinsic(_any_reaches)
store_totals: Any = intrinsic(_store_totals)
multiplied: Any = intrinsic(_elementwise(lambda builder, a, b: builder.fmul(a, b), 2))
added: Any = intrinsic(_elementwise(lambda builder, a, b: builder.fadd(a, b), 2))
divided: Any = intrinsic(_elementwise(lambda builder, a, b: builder.fdiv(a, b), 2))
smaller: Any = intrinsic(_elementwise(lambda builder, a, b: _chosen(builder, "<", a, b), 2))
"""In each lane ``a`` where it is smaller, else ``b``: so ``b`` where one of them is NaN."""
larger: Any = intrinsic(_elementwise(lambda builder, a, b: _chosen(builder, ">", a, b), 2))
"""In each lane ``a`` where it is larger, else ``b``: so ``b`` where one of them is NaN."""
fused: Any = intrinsic(_named("fma", 3))
"""``a * b + c``."""
_times_two_to: Any = intrinsic(_elementwise(_times_power_of_two, 2))

_SHIFT = np.float32(1.5 * 2**_EXPONENT_SHIFT)
"""Added to a number of at most 2 ** 22, it rounds it to an integer, which is in the last bits."""
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(87.0)
_LOWEST_POWER = np.float32(-125.0)
_LOG2_E = np.float32(np.log2(np.e))
_LOG2_E_REST = np.float32(np.log2(np.e) - float(_LOG2_E))
_DEGREE = 5
_TERMS = tuple(
    Chebyshev.interpolate(np.exp2, _DEGREE, (-0.5, 0.5))
    .convert(kind=Polynomial)
    .coef[::-1]
    .astype(np.float32)
)
"""The coefficients of a polynomial of ``2 ** t`` with an error of 1e-7, where ``|t|`` is at most
0.5."""
_ONE, _TWO = np.float32(1.0), np.float32(2.0)


@inlined
def _series(t: Any) -> Any:
    series = spread(_TERMS[0])
    for term in _TERMS[1:]:
        series = fused(series, t, spread(term))
    return series


@inlined
def power_of_two(x: Any) -> Any:
    """``2 ** x`` to within two units in the last place, from -125 to 126; below that, the value at
    -125; for NaN, NaN.

    ``x = n + t`` with a whole ``n``, and a polynomial of ``2 ** t``.
    """
    x = larger(spread(_LOWEST_POWER), x)
    shifted = added(x, spread(_SHIFT))
    n = added(shifted, spread(-_SHIFT))
    return _times_two_to(_series(fused(n, spread(-_ONE), x)), shifted)


@inlined
def exponential(x: Any) -> Any:
    """``e ** x`` likewise, between -87 and 87; beyond, the value at the limit."""
    x = smaller(spread(_HIGHEST), larger(spread(_LOWEST), x))
    shifted = fused(x, spread(_LOG2_E), spread(_SHIFT))
    n = added(shifted, spread(-_SHIFT))
    t = fused(x, spread(_LOG2_E_REST), fused(x, spread(_LOG2_E), multiplied(n, spread(-_ONE))))
    return _times_two_to(_series(t), shifted)


@inlined
def tanh(x: Any) -> Any:
    """The hyperbolic tangent, to within 1e-6."""
    grown = added(exponential(multiplied(x, spread(_TWO))), spread(_ONE))
    return fused(spread(-_TWO), divided(spread(_ONE), grown), spread(_ONE))
