"""Thirty-two bfloat16 at a time, multiplied and summed in pairs by the processor (AVX-512 BF16).

Each lane of the sums gets the products of two neighbours; sums are float32, and which numbers a sum
adds in which order depends on nothing else.

These functions can be compiled only where
:data:`~hdserve.engine.kernels.registers.HAS_AVX512_BF16`.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from hdserve.engine.kernels.blocks import with_products, with_spread_rows
from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import (
    VECTOR,
    in_all_lanes,
    pointer_to,
)

NUM_PAIRED: Final = 2 * NUM_LANES
"""Numbers that one load takes."""


class BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


_HALF = ir.IntType(16)
_HALVES = ir.VectorType(_HALF, NUM_PAIRED)
_WORD = ir.IntType(32)
_PAIRS = ir.VectorType(BFloat16(), NUM_PAIRED)


class _PairsType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"bfloat16x{NUM_PAIRED}")


_pairs: Final = _PairsType()


@register_model(_PairsType)
class _PairsModel(PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _HALVES)  # type: ignore[no-untyped-call]


def _load_pairs(_context: Any, array: Any, indices: Any) -> Any:
    """Thirty-two bfloat16 from ``indices`` of C-contiguous ``array`` on, whatever its dtype."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], *args)
        return builder.load(builder.bitcast(pointer, _HALVES.as_pointer()), align=2)

    return _pairs(array, indices), codegen


def _fuse(builder: Any, left: Any, right: Any, sums: Any) -> Any:
    """``sums`` and the products of the pairs."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    pairs = [builder.bitcast(vector, _PAIRS) for vector in (left, right)]
    return builder.call(function, [sums, *pairs])


def _spread_from(context: Any, builder: Any, kind: Any, array: Any, indices: Any) -> Any:
    pointer = pointer_to(context, builder, kind, array, indices)
    word = builder.load(builder.bitcast(pointer, _WORD.as_pointer()), align=2)
    return builder.bitcast(in_all_lanes(builder, word), _HALVES)


def _spread_pair(_context: Any, array: Any, indices: Any) -> Any:
    """The pair at ``array[indices]``, in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread_from(context, builder, signature.args[0], *args)

    return _pairs(array, indices), codegen


def fuses_rows(num_rows: int) -> Any:
    """The function of :func:`~hdserve.engine.kernels.blocks.with_spread_rows` for pairs."""
    return with_spread_rows(_spread_from, _fuse, num_rows)


def _load_in_turns(_context: Any, array: Any, first: Any, second: Any) -> Any:
    """Pairs of one bfloat16 from ``first`` on and one from ``second`` on of ``array``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = ir.VectorType(_HALF, NUM_LANES)

        def load(indices: Any) -> Any:
            pointer = pointer_to(context, builder, signature.args[0], args[0], indices)
            return builder.load(builder.bitcast(pointer, halves.as_pointer()), align=2)

        turns = [lane // 2 + lane % 2 * NUM_LANES for lane in range(NUM_PAIRED)]
        mask = ir.Constant(ir.VectorType(_WORD, NUM_PAIRED), turns)
        return builder.shuffle_vector(load(args[1]), load(args[2]), mask)

    return _pairs(array, first, second), codegen


def _store_pairs(_context: Any, array: Any, indices: Any, vector: Any) -> Any:
    """Store thirty-two bfloat16 from ``indices`` of ``array`` on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(array, indices, vector), codegen


def _store_halves(_context: Any, array: Any, indices: Any, vector: Any) -> Any:
    """Store sixteen float32, rounded to bfloat16, from ``indices`` of any ``array`` on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = builder.fptrunc(args[2], ir.VectorType(BFloat16(), NUM_LANES))
        halves = ir.VectorType(_HALF, NUM_LANES)
        pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
        place = builder.bitcast(pointer, halves.as_pointer())
        builder.store(builder.bitcast(rounded, halves), place, align=2)
        return context.get_dummy_value()

    return types.void(array, indices, vector), codegen


load_pairs: Any = intrinsic(_load_pairs)
load_in_turns: Any = intrinsic(_load_in_turns)
spread_pair: Any = intrinsic(_spread_pair)
store_pairs: Any = intrinsic(_store_pairs)
store_halves: Any = intrinsic(_store_halves)
fused_pairs: Any = with_products(_fuse)
