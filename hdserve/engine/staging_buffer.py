"""An array on the host, from which a copy on a device is made."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


class StagingBuffer:
    """An array and its copy, zeros at first.

    Attributes:
        here: the array on the host.
        there: its copy, which always lies in the same place.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.here: npt.NDArray[Any] = self._pinned.numpy()
        self.there = torch.zeros(shape, dtype=dtype, device=device)

    def send(self) -> None:
        """Copy it, in the order of what the device is told to do; what is copied is read then, so
        that a graph may send it, too."""
        self.there.copy_(self._pinned, non_blocking=True)
