"""How the kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

from hdserve.databases.compiled import OPTIONS, strictly_inlined
from hdserve.databases.kernel_cache import keep_compiled
from hdserve.engine.kernels.registers import HAS_AVX512

_F = TypeVar("_F", bound="Callable[..., Any]")

inlined = strictly_inlined
"""Compile a part of an entry point, inlined; operations happen in the order in which they are
written, as everywhere here."""


def apart(function: _F) -> _F:
    """Compile a part of an entry point, of two arguments, as a call that is never inlined: other
    code in the same large function would slow its loops down."""
    compiled = numba.njit(**OPTIONS)(function)

    def build(typing_context: Any, first: Any, second: Any) -> Any:
        kind = typing_context.resolve_value_type(compiled)
        signature = kind.get_call_type(typing_context, (first, second), {})
        made = compiled.overloads[signature.args]

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            context.add_linking_libs([made.library])
            callee = context.declare_function(builder.module, made.fndesc)
            _status, found = context.call_conv.call_function(
                builder, callee, signature.return_type, signature.args, args, attrs=("noinline",)
            )
            return found

        return signature, codegen

    return cast("_F", intrinsic(build))


def entry_point(function: _F) -> _F:
    """Compile a function that Python calls, and cache it on disk."""
    compiled = numba.njit(**OPTIONS)(function)
    keep_compiled(compiled, takes_baseline=not HAS_AVX512)
    return cast("_F", compiled)


def address_in_c(kernel: Callable[..., None], signature: Any) -> int:
    """The address of an entry point for callers in C, with the argument types of ``signature``;
    valid for the rest of the process.

    It is the same code that Python calls with arguments of these types, also on disk, where it is
    kept under what is compiled: a call from Python gives types of arguments and nothing else.
    """
    compiled = cast("Any", kernel)
    compiled.compile(signature.args)
    made = compiled.overloads[signature.args]
    address: int = made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)
    return address
