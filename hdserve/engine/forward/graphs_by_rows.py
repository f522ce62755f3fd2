"""A graph compiled twice, for few rows and for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class GraphsByRows:
    """Calls the one that is made for the number of rows.

    Attributes:
        of_few: for at most ``max_few`` rows.
        place: of the rows' token ids among the inputs.
    """

    of_few: Run
    of_many: Run
    place: int
    max_few: int

    def __call__(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        is_few = inputs[self.place].shape[0] <= self.max_few
        return (self.of_few if is_few else self.of_many)(*inputs)
