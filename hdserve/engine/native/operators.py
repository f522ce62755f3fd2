"""The operators of a compiled model without Python in between (docs/adr/0019).

A compiled model calls two operators of ours, a linear layer and attention, dozens of times a step.
As Python functions they take 14 and 33 us to call, and wait for any other Python code of the
process; in C++, ``operators.cpp``, 3 and 5 us.  The kernels are the same.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Final, cast

import numba
import torch

from hdserve.databases.cache_lines import address_of
from hdserve.engine.attention import packed  # noqa: F401 - with operators
from hdserve.engine.attention.cpu_tree import (
    NO_WINDOW,
    PAIRS_PER_KEY,
    SPARE_COLUMNS,
    can_attend_with_amx,
)
from hdserve.engine.batch.step_plan import StepPlan
from hdserve.engine.hardware.workers import load_openmp
from hdserve.engine.kernels.amx_attention import attend_with_amx
from hdserve.engine.kernels.attention import attend
from hdserve.engine.kernels.attention_call import QUERIES_PER_TILE
from hdserve.engine.kernels.bf16_dot_attention import attend_by_bf16_dot
from hdserve.engine.kernels.compiled import address_in_c
from hdserve.engine.kernels.linear import OUTPUTS_AT_ONCE, multiply_at
from hdserve.engine.kernels.pairs import NUM_PAIRED
from hdserve.engine.kernels.registers import HAS_AVX512_BF16
from hdserve.engine.linear import prepacked, skinny  # noqa: F401 - with operators
from hdserve.engine.linear.prepacked import prepacked_kernel
from hdserve.engine.linear.skinny import ROWS_WHILE_READ
from hdserve.engine.native.compiler import compile_library

logger = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("operators.cpp")
_LOADING: Final = Lock()

_MIN_WEIGHTS_PER_THREAD: Final = 1 << 15
"""An eighth of the Python operators' number.  Two threads took 1.78 ms for a forward of 17 rows of
hdserve-tiny in bfloat16, and 2.37 ms with Python's number; in float32 3.1 and 4.3 ms (Zen
4)."""

_MIN_PAIRS_PER_THREAD: Final = 512
"""A thirty-second of the Python operators' number.  For 4 x 17 queries after 300 keys two threads
took 27 us and one took 42; for 4 x 4 queries 14 and 20 (AMX).  In a forward little work is worth
sharing, too (docs/adr/0042)."""

_I, _D = numba.int64, numba.float64
_MULTIPLY: Final = numba.void(*[_I] * 9)
"""``Multiply`` of ``operators.cpp``."""

_MULTIPLY_PREPACKED: Final = numba.void(*[_I] * 10)
"""``MultiplyPrepacked``."""

_ATTEND: Final = numba.void(*[_I] * 8, _D, _D, *[_I] * 4)
"""``Attend``."""

_ATTEND_BFLOAT16: Final = numba.void(*[_I] * 7, _D, _D, *[_I] * 4)
"""``AttendBfloat16``: in pairs or by tiles."""


class _Kernels(ctypes.Structure):
    """``Kernels`` of ``operators.cpp``."""

    _fields_: ClassVar = [
        ("multiply", ctypes.c_void_p),
        ("multiply_prepacked", ctypes.c_void_p),
        ("multiply_prepacked_floats", ctypes.c_void_p),
        ("attend", ctypes.c_void_p),
        ("attend_by_bf16_dot", ctypes.c_void_p),
        ("attend_with_amx", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        ("outputs_at_once", ctypes.c_int64),
        ("num_paired", ctypes.c_int64),
        ("min_weights_per_thread", ctypes.c_int64),
        ("rows_while_read", ctypes.c_int64),
        ("queries_per_tile", ctypes.c_int64),
        ("spare_columns", ctypes.c_int64),
        ("min_pairs_per_thread", ctypes.c_int64),
        ("pairs_per_key", ctypes.c_int64),
        ("no_window", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    """``Step`` of ``operators.cpp``."""

    _fields_: ClassVar = [
        ("num_threads", ctypes.c_int64),
        ("is_exact", ctypes.c_int64),
        ("kv_rows", ctypes.c_void_p),
        ("listed", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("item_bytes", ctypes.c_int64),
        ("uses_amx", ctypes.c_int64),
        ("scratch_floats", ctypes.c_int64),
        ("most_visible", ctypes.c_int64),
        ("num_visible", ctypes.c_int64),
        ("num_shared", ctypes.c_int64),
    ]


class NativeOperators:
    """The operators, registered for the rest of the process.

    Raises:
        OSError: they are not available on this machine.
    """

    def __init__(self) -> None:
        openmp = load_openmp()
        if openmp is None:
            raise OSError("PyTorch does not use GNU OpenMP here")
        path = str(compile_library(_SOURCE))
        self._kernels = _Kernels(
            address_in_c(multiply_at, _MULTIPLY),
            _prepacked_kernel_in_c(torch.bfloat16),
            _prepacked_kernel_in_c(torch.float32),
            address_in_c(attend, _ATTEND),
            address_in_c(attend_by_bf16_dot, _ATTEND_BFLOAT16) if HAS_AVX512_BF16 else None,
            address_in_c(attend_with_amx, _ATTEND_BFLOAT16) if can_attend_with_amx() else None,
            ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p).value,
            OUTPUTS_AT_ONCE,
            NUM_PAIRED,
            _MIN_WEIGHTS_PER_THREAD,
            ROWS_WHILE_READ,
            QUERIES_PER_TILE,
            SPARE_COLUMNS,
            _MIN_PAIRS_PER_THREAD,
            PAIRS_PER_KEY,
            NO_WINDOW,
        )
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # the code of models calls it
        library.hdserve_set_kernels.argtypes = (ctypes.POINTER(_Kernels),)
        library.hdserve_begin_step.argtypes = (ctypes.POINTER(_Step),)
        library.hdserve_set_kernels(self._kernels)
        cast("Any", torch.ops).load_library(path)
        self._begin_step: Any = library.hdserve_begin_step

    @contextmanager
    def running(self, plan: StepPlan) -> Iterator[None]:
        """Within it, operators called by this thread belong to the step of ``plan``."""
        step = _describe(plan)  # lives until the step has ended
        try:
            self._begin_step(step)
            yield
        finally:
            self._begin_step(None)


def _prepacked_kernel_in_c(dtype: torch.dtype) -> int | None:
    kernel = prepacked_kernel(dtype)
    return None if kernel is None else address_in_c(kernel, _MULTIPLY_PREPACKED)


def load_operators() -> NativeOperators | None:
    """The operators of this process, compiled when a machine first needs them, in a minute or two
    with their kernels; ``None`` if they are not available, and Python's are used."""
    with _LOADING:
        return _load_once()


@cache
def _load_once() -> NativeOperators | None:
    try:
        return NativeOperators()
    except OSError as error:
        logger.warning("compiled models call their operators through Python: %s", error)
        return None


def _describe(plan: StepPlan) -> _Step:
    """Describe the plan of a step in C.  The memory this points to belongs to the plan."""
    of_all = plan.workers.num_threads, plan.is_exact, plan.kv_rows.data_ptr()
    if plan.listed is None or plan.spans:
        return _Step(*of_all)
    kernel, columns = plan.listed.kernel, plan.listed.columns
    return _Step(
        *of_all,
        address_of(columns.addresses),
        kernel.layers_at,
        plan.cache.dtype.itemsize,
        kernel.uses_amx,
        kernel.scratch_floats,
        columns.most_visible,
        columns.num_visible,
        columns.num_shared,
    )
