"""Transposing matrices in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from hdserve.engine.kernels.registers import NUM_LANES
from hdserve.engine.kernels.vectors import VECTOR, pointer_to

_WORD = ir.IntType(32)
_INT64 = ir.IntType(64)


def _lanes(values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_WORD, len(values)), values)


def _swapped(builder: Any, rows: list[Any], width: int) -> list[Any]:
    """One stage of a transposition: blocks of ``width`` next to the diagonal change places."""
    transposed = list(rows)
    for low in range(NUM_LANES):
        if low & width:
            continue
        high = low | width
        first = [n if not n & width else NUM_LANES + (n ^ width) for n in range(NUM_LANES)]
        second = [n | width if not n & width else NUM_LANES + n for n in range(NUM_LANES)]
        transposed[low] = builder.shuffle_vector(rows[low], rows[high], _lanes(first))
        transposed[high] = builder.shuffle_vector(rows[low], rows[high], _lanes(second))
    return transposed


def _store_transposed(_context: Any, source: Any, first: Any, target: Any, place: Any) -> Any:
    """Transpose a square of ``NUM_LANES`` rows of as many 32-bit words.

    It is read from ``first`` of C-contiguous ``source`` on, and written from ``place`` of
    ``target`` on, whatever their dtypes; rows are along the last dimension but one.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointers(array: int, corner: int) -> list[Any]:
            indices = cgutils.unpack_tuple(builder, args[corner])  # type: ignore[no-untyped-call]
            found = []
            for row in range(NUM_LANES):
                moved = list(indices)
                moved[-2] = builder.add(moved[-2], ir.Constant(_INT64, row))
                packed = cgutils.pack_array(builder, moved)  # type: ignore[no-untyped-call]
                kind = signature.args[array]
                pointer = pointer_to(context, builder, kind, args[array], packed)
                found.append(builder.bitcast(pointer, VECTOR.as_pointer()))
            return found

        rows = [builder.load(pointer, align=2) for pointer in pointers(0, 1)]
        width = 1
        while width < NUM_LANES:
            rows, width = _swapped(builder, rows, width), 2 * width
        for row, pointer in zip(rows, pointers(2, 3), strict=True):
            builder.store(row, pointer, align=4)
        return context.get_dummy_value()

    return types.void(source, first, target, place), codegen


store_transposed: Any = intrinsic(_store_transposed)
