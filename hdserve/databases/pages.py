"""Giving memory back to the system while the array it belongs to lives on."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt


def give_back_pages(array: npt.NDArray[np.generic]) -> None:
    """Return the whole pages of an array to the system; their content is lost.

    ``array`` must be contiguous and in numpy's own memory, not a file.  Does nothing if the system
    is not Linux.
    """
    if sys.platform != "linux" or not array.nbytes:
        return
    begin = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        system: Any = ctypes.CDLL(None)
        system.madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), int(mmap.MADV_DONTNEED)
        )
