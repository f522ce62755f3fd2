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
        self._found: dict[int, tuple[npt.NDArray[np.int32], Logits]] = {}
        """The same as arrays."""

    def send(self, logits: torch.Tensor) -> None:
        """Find those of ``logits [num_rows, vocab_size]``, as many as any drafter reads."""
        num_rows, vocab_size = logits.shape
        found = find_largest(logits, min(NUM_TOP, vocab_size))
        if num_rows not in self._here:
            here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            values, columns = here.numpy()
            self._here[num_rows], self._found[num_rows] = here, (columns.view(np.int32), values)
        self._here[num_rows].copy_(found, non_blocking=True)

    def read(self, num_rows: int, num_read: int) -> tuple[Tokens, Logits]:
        """What was sent last of so many rows, once the device is done, of the first ``num_read``:
        tokens and their logits, ``[num_read, k]``, likeliest first."""
        tokens, logits = self._found[num_rows]
        return tokens[:num_read].astype(np.int64), logits[:num_read].copy()
