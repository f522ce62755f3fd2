"""The likeliest tokens of a forward's rows, found and sent to the host within the forward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdserve.databases.recycled import NUM_TOP
from hdserve.engine.gpu_kernels.top import find_largest

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class _Landing(NamedTuple):
    """Host memory that receives the likeliest tokens of some number of rows, and the arrays in
    it."""

    memory: torch.Tensor
    tokens: npt.NDArray[np.int32]
    logits: Logits


class GpuTopK:
    """Finds the likeliest tokens of a forward as part of it, so within a CUDA graph too; they are
    read after it."""

    def __init__(self) -> None:
        self._landings: dict[int, _Landing] = {}
        """The receiving memory, by the number of rows."""

    def send(self, logits: torch.Tensor) -> None:
        """Find the likeliest tokens of ``logits [num_rows, vocab_size]``, as many as any drafter
        may read."""
        num_rows, vocab_size = logits.shape
        found = find_largest(logits, min(NUM_TOP, vocab_size))
        if num_rows not in self._landings:
            memory = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            values, columns = memory.numpy()
            self._landings[num_rows] = _Landing(memory, columns.view(np.int32), values)
        self._landings[num_rows].memory.copy_(found, non_blocking=True)

    def read(self, num_rows: int, num_read: int) -> tuple[Tokens, Logits]:
        """The tokens sent last for ``num_rows`` rows; read them when the device has finished.

        Returns:
            The tokens of the first ``num_read`` rows and their logits, ``[num_read, k]``, the
            likeliest first.
        """
        _, tokens, logits = self._landings[num_rows]
        return tokens[:num_read].astype(np.int64), logits[:num_read].copy()
