"""Products of matrices in the tiles of the processor (AMX), as functions for compiled code.

A tile has 16 rows of 64 bytes.  A product takes 16 rows of 32 bfloat16 from the left; on the right
are 16 columns of 32, two numbers of a column next to each other; their sums are 16 rows of 16
float32.  Each number of a product depends on its row and its column alone.

These functions can be compiled only where :func:`~hdserve.engine.hardware.devices.has_amx_bf16`,
with vectors that :data:`~hdserve.engine.kernels.registers.HAS_AVX512_BF16`.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from hdserve.engine.kernels.vectors import pointer_to

TILE_ROWS: Final = 16
PAIRED: Final = 32
"""Numbers that one product sums up."""

ROW_BYTES: Final = 64

NUM_SUMS: Final = 4
"""Tiles of sums that :data:`add_to_sums` adds to in turn."""

_LEFT, _RIGHT, _SCORES, _SUMS = 0, 1, 2, 4
_NUM_TILES: Final = 8
_BYTE: Final = ir.IntType(8)


def _instruction(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, kind, f"llvm.x86.{name}"
    )
    builder.call(function, args)


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _byte_pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
    return builder.bitcast(pointer, _BYTE.as_pointer())


def _on_memory(name: str, tile: int) -> Any:
    """Move a tile from or to memory at ``array[indices]``, with rows ``stride`` bytes apart."""

    def typed(_context: Any, array: Any, indices: Any, stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _byte_pointer(context, builder, signature, args)
            _instruction(builder, name, _tile(tile), pointer, args[2])
            return context.get_dummy_value()

        return types.void(array, indices, types.int64), codegen

    return intrinsic(typed)


def _on_tiles(name: str, *tiles: int) -> Any:
    def typed(_context: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            _instruction(builder, name, *map(_tile, tiles))
            return context.get_dummy_value()

        return types.void(), codegen

    return intrinsic(typed)


def _configure(_context: Any) -> Any:
    sizes = bytearray(64)
    sizes[0] = 1  # the palette
    sizes[16:32:2] = [ROW_BYTES] * _NUM_TILES
    sizes[48:56] = [TILE_ROWS] * _NUM_TILES

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        constant = ir.Constant(ir.ArrayType(_BYTE, len(sizes)), sizes)
        kept = cgutils.global_constant(builder, "tile_sizes", constant)  # type: ignore[no-untyped-call]
        _instruction(builder, "ldtilecfg", builder.bitcast(kept, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


configure: Any = intrinsic(_configure)
"""Configure eight tiles of full size for this thread."""
release: Any = _on_tiles("tilerelease")
load_left: Any = _on_memory("tileloadd64", _LEFT)
load_right: Any = _on_memory("tileloadd64", _RIGHT)
clear_scores: Any = _on_tiles("tilezero", _SCORES)
add_to_scores: Any = _on_tiles("tdpbf16ps", _SCORES, _LEFT, _RIGHT)
store_scores: Any = _on_memory("tilestored64", _SCORES)
clear_sums: Any = tuple(_on_tiles("tilezero", _SUMS + n) for n in range(NUM_SUMS))
add_to_sums: Any = tuple(_on_tiles("tdpbf16ps", _SUMS + n, _LEFT, _RIGHT) for n in range(NUM_SUMS))
store_sums: Any = tuple(_on_memory("tilestored64", _SUMS + n) for n in range(NUM_SUMS))
