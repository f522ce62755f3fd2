"""An array on the host, from which a copy on a device is made."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class CpuGpuBuffer:
    """An array and its copy, zeros at first.

    Attributes:
        host: the array.
        device: its copy, whose address never changes.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: npt.NDArray[Any] = self._pinned.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def send(self) -> None:
        """Copy it, in stream order; the host array is read at that time, so the copy can be part of
        a CUDA graph."""
        self.device.copy_(self._pinned, non_blocking=True)
