"""Blocks of sums, some rows by four columns, each a vector, that stay in registers.

A vector of every row is multiplied with one of every column, so each loaded vector is used several
times.  Compiled code holds a block as a tuple, row by row; :func:`repeated` makes such tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from hdserve.engine.kernels.vectors import (
    VECTOR,
    call_llvm,
    in_all_lanes,
    pointer_to,
    vector_type,
)

NUM_COLUMNS: Final = 4


def repeated(function: Any, count: int) -> Any:
    """A function for compiled code that returns the tuple of ``function(0, given)``,
    ``function(1, given)``, and so on.

    Args:
        function: compiled; ``given`` is one value, of any type.
    """

    def build(typing_context: Any, given: Any) -> Any:
        called = typing_context.resolve_value_type(function)
        signature = called.get_call_type(typing_context, (types.intp, given), {})
        found = types.UniTuple(signature.return_type, count)  # type: ignore[no-untyped-call]

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            call = context.get_function(called, signature)
            context.add_linking_libs(getattr(call, "libs", ()))
            numbers = (context.get_constant(types.intp, number) for number in range(count))
            items = [call(builder, (number, *arguments)) for number in numbers]
            return context.make_tuple(builder, found, items)

        return found(given), codegen

    return intrinsic(build)


def chosen(functions: Mapping[int, Any]) -> Any:
    """A function for compiled code that calls the function whose number is its first argument, or
    else the last function, with its second argument, of any type.

    Args:
        functions: compiled, by number; they return nothing.
    """

    def build(typing_context: Any, number: Any, given: Any) -> Any:
        called = [typing_context.resolve_value_type(function) for function in functions.values()]
        signatures = [each.get_call_type(typing_context, (given,), {}) for each in called]

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            asked, value = arguments
            after = builder.append_basic_block("after")
            cases = [builder.append_basic_block(f"case.{own}") for own in functions]
            switch = builder.switch(asked, cases[-1])
            for own, case, each, signature in zip(
                functions, cases, called, signatures, strict=True
            ):
                call = context.get_function(each, signature)
                context.add_linking_libs(getattr(call, "libs", ()))
                switch.add_case(own, case)
                with builder.goto_block(case):
                    call(builder, (value,))
                    builder.branch(after)
            builder.position_at_end(after)
            return context.get_dummy_value()

        return types.void(number, given), codegen

    return intrinsic(build)


def zeros(num_rows: int, num_columns: int = NUM_COLUMNS) -> Any:
    """A function for compiled code that returns a block of zeros."""
    block = types.UniTuple(vector_type, num_rows * num_columns)  # type: ignore[no-untyped-call]

    def build(_context: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            zero = ir.Constant(VECTOR, None)
            return context.make_tuple(builder, block, [zero] * len(block))

        return block(), codegen

    return intrinsic(build)


def with_products(fuse: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """A function for compiled code that adds the products of rows and columns to a block and
    returns the result.

    It takes the tuples of the rows' vectors and of the columns', and the block.

    Args:
        fuse: builds the code that adds one product to a sum; it gets the builder, the row's vector,
            the column's vector, and the sum.
    """

    def build(_context: Any, rows: Any, columns: Any, block: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            lefts, rights, sums = (
                [builder.extract_value(part, index) for index in range(len(kind))]
                for part, kind in zip(arguments, (rows, columns, block), strict=True)
            )
            for number, right in enumerate(rights):
                for index, left in enumerate(lefts):
                    place = index * len(rights) + number
                    sums[place] = fuse(builder, left, right, sums[place])
            return context.make_tuple(builder, block, sums)

        return block(rows, columns, block), codegen

    return intrinsic(build)


def with_spread_rows(
    spread: Callable[..., Any], fuse: Callable[[Any, Any, Any, Any], Any], num_rows: int
) -> Any:
    """A function for compiled code that adds to a block the products of what ``num_rows`` rows have
    at ``rows[row, column]`` and those of ``columns``.

    What a row has is loaded when it is multiplied, so that of all rows takes one register.

    Args:
        spread: builds the code that loads an item of an array into all lanes; it gets the context,
            the builder, the array's type, the array, and the indices.
        fuse: see :func:`with_products`.
    """

    def build(_context: Any, rows: Any, row: Any, column: Any, columns: Any, block: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array, first, place, *parts = args
            rights, sums = (
                [builder.extract_value(part, index) for index in range(len(kind))]
                for part, kind in zip(parts, (columns, block), strict=True)
            )
            for index in range(num_rows):
                own = builder.add(first, context.get_constant(types.intp, index))
                at = cgutils.pack_array(builder, [own, place])  # type: ignore[no-untyped-call]
                left = spread(context, builder, signature.args[0], array, at)
                for number, right in enumerate(rights):
                    sum_at = index * len(rights) + number
                    sums[sum_at] = fuse(builder, left, right, sums[sum_at])
            return context.make_tuple(builder, block, sums)

        return block(rows, row, column, columns, block), codegen

    return intrinsic(build)


def _fuse(builder: Any, *vectors: Any) -> Any:
    return call_llvm(builder, "fma", *vectors)


def _spread_from(context: Any, builder: Any, kind: Any, array: Any, indices: Any) -> Any:
    number = builder.load(pointer_to(context, builder, kind, array, indices))
    return in_all_lanes(builder, number)


fused_block: Any = with_products(_fuse)
"""The function of :func:`with_products` for vectors of float32."""


def fuses_rows(num_rows: int) -> Any:
    """The function of :func:`with_spread_rows` for rows and columns of float32."""
    return with_spread_rows(_spread_from, _fuse, num_rows)
