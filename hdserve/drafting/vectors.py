"""Arithmetic on rows of ``NUM_INPUTS`` float32, one vector register or two.

The rows are those of C-contiguous arrays of exactly that many columns.  Plain loops over them were
compiled to scalar code, because the arrays may overlap for all the compiler knows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from hdserve.drafting.arrays import NUM_INPUTS

_VECTOR = ir.VectorType(ir.FloatType(), NUM_INPUTS)
_FAST = ("fast",)


def _pointer(context: Any, builder: Any, array_type: Any, value: Any, row: Any) -> Any:
    array = context.make_array(array_type)(context, builder, value)
    zero = context.get_constant(types.intp, 0)
    pointer = cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
        context, builder, array_type, array, [row, zero], wraparound=False
    )
    return builder.bitcast(pointer, _VECTOR.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    return builder.load(pointer, align=4)


def _sum(builder: Any, vector: Any) -> Any:
    function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _VECTOR])
    reduce = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, f"llvm.vector.reduce.fadd.v{NUM_INPUTS}f32"
    )
    zero = ir.Constant(ir.FloatType(), 0.0)
    return builder.call(reduce, [zero, vector], fastmath=_FAST)


def _copy_row(typing_context: Any, target: Any, to: Any, source: Any, row: Any) -> Any:
    """``target[to] = source[row]``; the items may be any of four bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        vector = _load(builder, _pointer(context, builder, kinds[2], args[2], args[3]))
        builder.store(vector, _pointer(context, builder, kinds[0], args[0], args[1]), align=4)
        return context.get_dummy_value()

    return types.void(target, to, source, row), codegen


def _add_scaled(
    typing_context: Any, target: Any, to: Any, scale: Any, source: Any, row: Any
) -> Any:
    """``target[to] += scale * source[row]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        vector = _load(builder, _pointer(context, builder, kinds[3], args[3], args[4]))
        place = _pointer(context, builder, kinds[0], args[0], args[1])
        empty = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(empty, args[2], ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), NUM_INPUTS), [0] * NUM_INPUTS)
        scales = builder.shuffle_vector(first, empty, mask)
        change = builder.fmul(vector, scales, flags=_FAST)
        builder.store(builder.fadd(_load(builder, place), change, flags=_FAST), place, align=4)
        return context.get_dummy_value()

    return types.void(target, to, types.float32, source, row), codegen


def _dot(typing_context: Any, first: Any, row: Any, second: Any, other: Any) -> Any:
    """The scalar product of ``first[row]`` and ``second[other]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        left = _load(builder, _pointer(context, builder, kinds[0], args[0], args[1]))
        right = _load(builder, _pointer(context, builder, kinds[2], args[2], args[3]))
        return _sum(builder, builder.fmul(left, right, flags=_FAST))

    return types.float32(first, row, second, other), codegen


def _dot_of_sum(
    typing_context: Any, first: Any, row: Any, base: Any, second: Any, other: Any
) -> Any:
    """The scalar product of ``first[row] + base[0]`` and ``second[other]``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        zero = context.get_constant(types.intp, 0)
        left = _load(builder, _pointer(context, builder, kinds[0], args[0], args[1]))
        added = _load(builder, _pointer(context, builder, kinds[2], args[2], zero))
        right = _load(builder, _pointer(context, builder, kinds[3], args[3], args[4]))
        product = builder.fmul(builder.fadd(left, added, flags=_FAST), right, flags=_FAST)
        return _sum(builder, product)

    return types.float32(first, row, base, second, other), codegen


copy_row: Any = intrinsic(_copy_row)
add_scaled: Any = intrinsic(_add_scaled)
dot: Any = intrinsic(_dot)
dot_of_sum: Any = intrinsic(_dot_of_sum)
