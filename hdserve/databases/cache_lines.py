"""Memory in cache lines of 64 bytes: allocating, addressing, prefetching and giving it back."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

LINE_WORDS = 16
LINE_BYTES = 4 * LINE_WORDS

MAPPED_BYTES = 1 << 18
"""From this size on memory comes from the system already zeroed: reused memory would be zeroed at
allocation, which takes a millisecond for 16 MiB."""

_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0)
"""Address space may exceed the memory there is."""


def new_lines(num_lines: int) -> npt.NDArray[np.uint32]:
    """Zeroed cache lines: ``uint32[num_lines, 16]``.  Pages are taken when first touched."""
    num_bytes = num_lines * LINE_BYTES
    if num_bytes >= MAPPED_BYTES:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED
        memory = mmap.mmap(-1, num_bytes, flags=flags)
        return np.frombuffer(memory, np.uint32).reshape(-1, LINE_WORDS)
    num_words = num_lines * LINE_WORDS
    buffer = np.zeros(num_words + LINE_WORDS, np.uint32)
    offset = -address_of(buffer) % LINE_BYTES // 4
    return buffer[offset : offset + num_words].reshape(-1, LINE_WORDS)


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of the first element of ``array``; five times as fast as ``array.ctypes.data``."""
    address: int = array.__array_interface__["data"][0]
    return address


def give_back_pages(array: npt.NDArray[np.generic]) -> None:
    """Return the whole pages of an array to the system; their content is lost, the array lives on.

    ``array`` must be contiguous and in numpy's own memory, not a file.  Does nothing if the system
    is not Linux.
    """
    if sys.platform != "linux" or not array.nbytes:
        return
    begin = -(-address_of(array) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address_of(array) + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        system: Any = ctypes.CDLL(None)
        system.madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), int(mmap.MADV_DONTNEED)
        )


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of the first entry at ``index``, without waiting for it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        rest = [context.get_constant(types.intp, 0)] * (signature.args[0].ndim - 1)
        pointer = cgutils.get_item_pointer(
            context, builder, signature.args[0], array, [args[1], *rest], wraparound=False
        )
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        integer = ir.IntType(32)
        function_type = ir.FunctionType(
            ir.VoidType(), [cgutils.voidptr_t, integer, integer, integer]
        )
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], function_type
        )
        builder.call(prefetch, [pointer, integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


prefetch_line: Any = intrinsic(_prefetch)
