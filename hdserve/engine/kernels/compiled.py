"""How the kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
from numba.extending import intrinsic

from hdserve.databases.kernel_cache import keep_compiled
from hdserve.engine.kernels.registers import HAS_AVX512

OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Options of numba: without reference counting (``_nrt``), which the arrays of callers do not need,
and without ``fastmath``, so that operations happen in the order in which they are written."""

_F = TypeVar("_F", bound="Callable[..., Any]")


def inlined(function: _F) -> _F:
    """Compile a part of an entry point."""
    return cast("_F", numba.njit(**OPTIONS, forceinline=True)(function))


def apart(function: _F) -> _F:
    """Compile a part of an entry point, of two arguments, that is called and never inlined: loops
    of a large function get slower by what else is in it."""
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
    """Compile what Python calls, and keep it on disk."""
    compiled = numba.njit(**OPTIONS)(function)
    keep_compiled(compiled, takes_baseline=not HAS_AVX512)
    return cast("_F", compiled)


def address_in_c(kernel: Callable[..., None], signature: Any) -> int:
    """Where an entry point begins for those who call it as a function of C with the argument types
    of ``signature``; it stays there for the rest of the process.

    It is the code that Python calls with arguments of these types.
    """
    compiled = cast("Any", kernel)
    compiled.compile(signature)
    made = compiled.overloads[signature.args]
    address: int = made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)
    return address
