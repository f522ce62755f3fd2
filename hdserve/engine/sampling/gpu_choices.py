"""The tokens a forward itself finds after its rows, and sends to the host: the likeliest ones, and
one drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdserve.databases.recycled import NUM_TOP

_Logits = npt.NDArray[np.float32]


class FoundTokens(NamedTuple):
    """Tokens after ``num_rows`` rows.

    Attributes:
        likeliest: their ids and logits, ``[num_rows, k]``, the likeliest first.
        drawn: ``[num_rows]``: the first to arrive in each row's race,
            :data:`~hdserve.engine.kernels.draw.NO_TOKEN` if it has none or no token can be chosen.
    """

    likeliest: tuple[npt.NDArray[np.int64], _Logits]
    drawn: npt.NDArray[np.int64]


class _Landing(NamedTuple):
    """Host memory that receives the tokens of some number of rows, and the arrays in it."""

    memory: torch.Tensor
    tokens: npt.NDArray[np.int32]
    logits: _Logits


class GpuChoices:
    """Finds tokens as part of a forward, so within a CUDA graph too; they are read after it.

    Only where :func:`~hdserve.engine.gpu_kernels.are_available`.
    """

    def __init__(self) -> None:
        from hdserve.engine.gpu_kernels.choices import find_and_draw

        self._find_and_draw = find_and_draw
        self._landings: dict[int, _Landing] = {}
        """The receiving memory, by the number of rows."""

    def send(self, logits: torch.Tensor, races: torch.Tensor) -> None:
        """Find the tokens of ``logits [num_rows, vocab_size]``; of the likeliest as many as any
        drafter may read.

        Args:
            races: see :mod:`hdserve.engine.batch.races`.
        """
        num_rows, vocab_size = logits.shape
        found = self._find_and_draw(logits, min(NUM_TOP, vocab_size), races)
        if num_rows not in self._landings:
            memory = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            values, columns = memory.numpy()
            self._landings[num_rows] = _Landing(memory, columns.view(np.int32), values)
        self._landings[num_rows].memory.copy_(found, non_blocking=True)

    def read(self, num_rows: int, num_read: int) -> FoundTokens:
        """The tokens sent last for ``num_rows`` rows, of the first ``num_read``; read them when the
        device has finished."""
        _, tokens, logits = self._landings[num_rows]
        found = tokens[:num_read].astype(np.int64)
        return FoundTokens((found[:, :-1], logits[:num_read, :-1].copy()), found[:, -1])
