"""The arrays at given addresses, for compiled functions.

Making a NumPy array of a tensor takes one or two microseconds, as long as a small product; an
address takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from hdserve.databases.cache_lines import LINE_BYTES


def _builds(item: Any, num_dimensions: int) -> tuple[Any, Callable[..., Any]]:
    """Signature and code of a function of an address and one size for each dimension."""
    kind = types.Array(item, num_dimensions, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, *shape = args
        array = context.make_array(kind)(context, builder)
        size = context.get_constant(types.intp, item.bitwidth // 8)
        strides = [size]
        for length in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], length))
        data = builder.inttoptr(first, array.data.type)
        populate_array(array, data, shape, strides, size, None)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return kind(*[types.intp] * (1 + num_dimensions)), codegen


def _matrix_at(item: Any) -> Any:
    return intrinsic(lambda _context, _address, _rows, _columns: _builds(item, 2))


def _matrices_at(item: Any) -> Any:
    return intrinsic(lambda _context, _address, _number, _rows, _columns: _builds(item, 3))


def _stack_array(item: Any, num_rows: int, num_columns: int) -> Any:
    """Unlike numba's ``alloca_once`` it does not zero the memory at each call."""
    kind = types.Array(item, 2, "C")

    def build(_context: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            array = context.make_array(kind)(context, builder)
            room = ir.ArrayType(context.get_data_type(item), num_rows * num_columns)
            with builder.goto_entry_block():
                found = builder.alloca(room)
            found.align = LINE_BYTES
            data = builder.bitcast(found, array.data.type)
            num_bytes = item.bitwidth // 8
            sizes = (num_rows, num_columns, num_bytes * num_columns, num_bytes)
            rows, columns, stride, size = (context.get_constant(types.intp, n) for n in sizes)
            populate_array(  # type: ignore[no-untyped-call]
                array, data, [rows, columns], [stride, size], size, None
            )
            return array._getvalue()

        return kind(), codegen

    return intrinsic(build)


def stack_floats(num_rows: int, num_columns: int) -> Any:
    """A function for compiled code that allocates float32 ``[num_rows, num_columns]`` on the stack,
    not initialised, for the lifetime of the function that it is compiled into."""
    return _stack_array(types.float32, num_rows, num_columns)


def stack_bfloats(num_rows: int, num_columns: int) -> Any:
    """The same of bfloat16, viewed as uint16."""
    return _stack_array(types.uint16, num_rows, num_columns)


floats_at = _matrix_at(types.float32)
"""The float32 ``[num_rows, num_columns]`` at an address."""

bfloats_at = _matrix_at(types.uint16)
"""The bfloat16 ``[num_rows, num_columns]`` at an address, seen as uint16."""

integers_at = _matrix_at(types.int64)
"""The int64 ``[num_rows, num_columns]`` at an address."""

doubles_at = _matrix_at(types.float64)
"""The float64 ``[num_rows, num_columns]`` at an address."""

words_at = _matrix_at(types.uint32)
"""The float32 ``[num_rows, num_columns]`` at an address, their bits seen as uint32."""

word_matrices_at = _matrices_at(types.uint32)
"""The uint32 ``[number, num_rows, num_columns]`` at an address."""

float_matrices_at = _matrices_at(types.float32)
"""The float32 ``[number, num_rows, num_columns]`` at an address."""

bfloat_matrices_at = _matrices_at(types.uint16)
"""The bfloat16 ``[number, num_rows, num_columns]`` at an address, seen as uint16."""
