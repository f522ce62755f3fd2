"""The likeliest tokens of a forward's rows, found and sent to the host by the forward itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hdserve.databases.recycled import NUM_TOP
from hdserve.engine.gpu_kernels.top import find_largest

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class TopOfForward:
    """To be told the logits within the forward, which may be a CUDA graph, and read after it."""

    def __init__(self) -> None:
        self._here: dict[int, torch.Tensor] = {}

    def send(self, logits: torch.Tensor) -> None:
        """Find those of ``logits [num_rows, vocab_size]``, as many as any drafter reads."""
        num_rows, vocab_size = logits.shape
        found = find_largest(logits, min(NUM_TOP, vocab_size))
        if num_rows not in self._here:
            self._here[num_rows] = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._here[num_rows].copy_(found, non_blocking=True)

    def read(self, num_rows: int) -> tuple[Tokens, Logits]:
        """What was sent last of so many rows, once the device is done: tokens and their logits,
        ``[num_rows, k]``, likeliest first."""
        values, columns = self._here[num_rows].numpy()
        return columns.view(np.int32).astype(np.int64), values.copy()
