"""Arithmetic on rows of ``NUM_INPUTS`` float32, one vector register or two.

The rows are those of C-contiguous arrays of exactly that many columns.  Plain loops over them would
be compiled to scalar code, because the compiler must assume that the arrays overlap.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from hdserve.drafting.arrays import NUM_INPUTS

_VECTOR = ir.VectorType(ir.FloatType(), NUM_INPUTS)
_INDICES = ir.VectorType(ir.IntType(32), NUM_INPUTS)
FAST = ("fast",)


def row_pointer(
    context: Any, builder: Any, array_type: Any, value: Any, row: Any, vector: Any
) -> Any:
    """A pointer to the first items of a row, as a ``vector``."""
    array = context.make_array(array_type)(context, builder, value)
    zero = context.get_constant(types.intp, 0)
    pointer = cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
        context, builder, array_type, array, [row, zero], wraparound=False
    )
    return builder.bitcast(pointer, vector.as_pointer())


def load_row(context: Any, builder: Any, array_type: Any, value: Any, row: Any, vector: Any) -> Any:
    """The first items of a row."""
    pointer = row_pointer(context, builder, array_type, value, row, vector)
    return builder.load(pointer, align=4)


def repeat(builder: Any, value: Any, vector: Any) -> Any:
    """A ``vector`` with ``value`` in every lane."""
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, empty, mask)


def lane_mask(builder: Any, lanes: Any) -> Any:
    """A vector of bits as an integer, the first lane lowest."""
    mask = builder.bitcast(lanes, ir.IntType(lanes.type.count))
    return builder.zext(mask, ir.IntType(64))


def _sum(builder: Any, vector: Any) -> Any:
    function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _VECTOR])
    reduce = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, f"llvm.vector.reduce.fadd.v{NUM_INPUTS}f32"
    )
    zero = ir.Constant(ir.FloatType(), 0.0)
    return builder.call(reduce, [zero, vector], fastmath=FAST)


def _copy_row(typing_context: Any, target: Any, to: Any, source: Any, row: Any) -> Any:
    """``target[to] = source[row]``; the items may be any of four bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        vector = load_row(context, builder, kinds[2], args[2], args[3], _VECTOR)
        builder.store(
            vector, row_pointer(context, builder, kinds[0], args[0], args[1], _VECTOR), align=4
        )
        return context.get_dummy_value()

    return types.void(target, to, source, row), codegen


def _add_scaled(
    typing_context: Any, target: Any, to: Any, scale: Any, source: Any, row: Any
) -> Any:
    """``target[to] += scale * source[row]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        vector = load_row(context, builder, kinds[3], args[3], args[4], _VECTOR)
        place = row_pointer(context, builder, kinds[0], args[0], args[1], _VECTOR)
        change = builder.fmul(vector, repeat(builder, args[2], _VECTOR), flags=FAST)
        builder.store(
            builder.fadd(builder.load(place, align=4), change, flags=FAST), place, align=4
        )
        return context.get_dummy_value()

    return types.void(target, to, types.float32, source, row), codegen


def _dot(typing_context: Any, first: Any, row: Any, second: Any, other: Any) -> Any:
    """The scalar product of ``first[row]`` and ``second[other]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        left = load_row(context, builder, kinds[0], args[0], args[1], _VECTOR)
        right = load_row(context, builder, kinds[2], args[2], args[3], _VECTOR)
        return _sum(builder, builder.fmul(left, right, flags=FAST))

    return types.float32(first, row, second, other), codegen


def _dot_of_sum(
    typing_context: Any,
    first: Any,
    row: Any,
    next_row: Any,
    more: Any,
    more_row: Any,
    base: Any,
    second: Any,
    other: Any,
) -> Any:
    """The scalar product of ``first[row] + first[next_row] + more[more_row] + base[0]`` and
    ``second[other]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        zero = context.get_constant(types.intp, 0)
        left = load_row(context, builder, kinds[0], args[0], args[1], _VECTOR)
        for index, array_row in ((0, args[2]), (3, args[4]), (5, zero)):
            added = load_row(context, builder, kinds[index], args[index], array_row, _VECTOR)
            left = builder.fadd(left, added, flags=FAST)
        right = load_row(context, builder, kinds[6], args[6], args[7], _VECTOR)
        return _sum(builder, builder.fmul(left, right, flags=FAST))

    signature = types.float32(first, row, next_row, more, more_row, base, second, other)
    return signature, codegen


def _gather_row(typing_context: Any, target: Any, source: Any, row: Any, indices: Any) -> Any:
    """``target[0] = source[row, indices[0]]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        zero = context.get_constant(types.intp, 0)
        places = load_row(context, builder, kinds[3], args[3], zero, _INDICES)
        first = row_pointer(context, builder, kinds[1], args[1], args[2], _VECTOR.element)
        found = ir.Constant(_VECTOR, ir.Undefined)
        for lane in range(NUM_INPUTS):
            index = ir.Constant(ir.IntType(32), lane)
            place = builder.gep(first, [builder.extract_element(places, index)])
            found = builder.insert_element(found, builder.load(place, align=4), index)
        builder.store(
            found, row_pointer(context, builder, kinds[0], args[0], zero, _VECTOR), align=4
        )
        return context.get_dummy_value()

    return types.void(target, source, row, indices), codegen


def _lowest_bit(typing_context: Any, mask: Any) -> Any:
    """The number of the lowest bit that is set in ``mask``, which is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


copy_row: Any = intrinsic(_copy_row)
add_scaled: Any = intrinsic(_add_scaled)
dot: Any = intrinsic(_dot)
dot_of_sum: Any = intrinsic(_dot_of_sum)
gather_row: Any = intrinsic(_gather_row)
lowest_bit: Any = intrinsic(_lowest_bit)
