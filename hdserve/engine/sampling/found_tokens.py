"""The tokens that a forward itself finds after its rows, where it does."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class FoundTokens(NamedTuple):
    """Tokens after ``num_rows`` rows.

    Attributes:
        likeliest: their ids and logits, ``[num_rows, k]``, the likeliest first.
        drawn: ``[num_rows]``: the first to arrive in each row's race,
            :data:`~hdserve.engine.kernels.draw.NO_TOKEN` if it has none or no token can be chosen.
    """

    likeliest: tuple[Tokens, Logits]
    drawn: Tokens


class FindTokens(Protocol):
    """See :class:`~hdserve.engine.sampling.gpu_choices.GpuChoices`."""

    def send(self, logits: torch.Tensor, races: torch.Tensor) -> None: ...

    def read(self, num_rows: int, num_read: int) -> FoundTokens: ...
