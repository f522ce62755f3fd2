"""Threads that share the compiled work of a forward with the thread that runs it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path

import torch

Work = Callable[[int, int, int], object]
"""Does the items from the second number up to the third, as the part with the first number."""

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_SOFT_PAUSE = 1
"""OpenMP 5.0's soft pause: settings are kept."""


class Workers:
    """As many threads as PyTorch used when they were made: PyTorch's own if it uses GNU OpenMP.

    PyTorch's threads spin for some milliseconds while they wait for work, so others would compete
    with them for cores: eight rows of a model of 0.5 B parameters took 1.5 times as long on two.

    Args:
        uses_openmp: ``False`` always starts separate threads, as other platforms do.

    Attributes:
        num_threads: how many share work, including the caller's.
    """

    def __init__(self, *, uses_openmp: bool = True) -> None:
        self._openmp = load_openmp() if uses_openmp else None
        self.num_threads = torch.get_num_threads()
        self._threads: ThreadPoolExecutor | None = None
        self._region = _Region(self._run_parts)
        self._next_part: Callable[[], None] = _nothing
        self._errors: list[BaseException] = []

    @property
    def uses_openmp(self) -> bool:
        """Whether the threads are PyTorch's."""
        return self._openmp is not None

    def num_parts(self, size: int, size_per_part: int) -> int:
        """The number of parts into which work of ``size`` is divided."""
        if size < 2 * size_per_part:
            return 1
        return min(self.num_threads, size // size_per_part)

    def share(self, work: Work, num_items: int, num_parts: int) -> None:
        """Do ``num_items`` items in ``num_parts`` parts, in this thread and others."""
        if num_parts == 1:
            work(0, 0, num_items)
            return
        parts = count()

        def do_parts() -> None:
            while (part := next(parts)) < num_parts:
                work(part, num_items * part // num_parts, num_items * (part + 1) // num_parts)

        if self._openmp is None:
            self._share_with_own(do_parts, num_parts)
            return
        self._next_part = do_parts
        try:
            self._openmp.GOMP_parallel(self._region, None, self.num_threads, 0)
        finally:
            self._next_part = _nothing  # releases the work, which holds tensors
        errors = self._errors
        if errors:
            self._errors = []
            raise errors[0]

    def _run_parts(self, _data: int | None) -> None:
        """Do parts, in each thread of a parallel region."""
        try:
            self._next_part()
        except BaseException as error:
            self._errors.append(error)

    def _share_with_own(self, do_parts: Callable[[], None], num_parts: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.num_threads, "hdserve-forward")
        others = [self._threads.submit(do_parts) for _ in range(1, num_parts)]
        try:
            do_parts()
        finally:
            wait(others)  # they write to the caller's memory, so they must end first
        for other in others:
            other.result()


def load_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that PyTorch uses, if it has GNU's interface: one that was loaded before
    PyTorch (``LD_PRELOAD``), or the one bundled with PyTorch."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    for path in (None, *map(str, bundled)):
        library = ctypes.CDLL(path)
        if hasattr(library, "GOMP_parallel"):
            parameters = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.argtypes = parameters
            library.GOMP_parallel.restype = None
            return library
    return None


def _nothing() -> None:
    """Do nothing: between two parallel regions."""


def end_own_threads() -> None:
    """End the OpenMP threads that shared work with this one; new ones start when they are needed.

    Call it in a thread that shared work, before another takes over for good.  With GNU OpenMP each
    has its own pool, and if all pools together have more threads than cores, none of them spins
    while it waits: a row of hdserve-mini on two cores took 6.8 instead of 0.56 ms in one thread
    after another had loaded the model.
    """
    openmp = load_openmp()
    if openmp is not None and hasattr(openmp, "omp_pause_resource_all"):
        openmp.omp_pause_resource_all(_SOFT_PAUSE)
