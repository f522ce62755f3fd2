"""Memory in huge pages, which the processor finds and prefetches faster than pages of 4 KB."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Shared memory, which is the default, gets no huge pages."""


def empty_in_huge_pages(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for the CPU whose memory Linux may back with huge pages; elsewhere it is like any
    other.

    Neighbouring tensors share huge pages, so no memory is wasted.

    Args:
        size: without zeros.
    """
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, **_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*size)
