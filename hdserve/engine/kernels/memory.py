"""The arrays at some addresses, for compiled functions.

To make a NumPy array of a tensor takes a microsecond or two, as long as a small product; an address
takes a tenth of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


def _builds(item: Any, num_dimensions: int) -> tuple[Any, Callable[..., Any]]:
    """Signature and code of a function of an address and as many sizes."""
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
