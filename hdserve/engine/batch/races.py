"""The races in which a forward draws the tokens after its nodes (:mod:`hdserve.noise`), where it
draws them itself: on a GPU.

Those of all rows with logits are ``[2, num_rows]`` int64: a key, and the bits of the inverse
temperature as a float64, 0 for a row after which nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Race(NamedTuple):
    """For the nodes of a tree.

    Attributes:
        keys: of the position of each.
        inverse_temperature: above 0.
    """

    keys: Sequence[int]
    inverse_temperature: float


RacesOfRows = Iterable[tuple[slice, Race | None]]
"""The rows of each tree, and its race, if there is one."""


def write_races(found: RacesOfRows, races: npt.NDArray[np.int64]) -> None:
    """Overwrite ``races [2, num_rows]``."""
    keys, inverse_temperatures = races[0], races[1].view(np.float64)
    inverse_temperatures[:] = 0.0
    for rows, race in found:
        if race is not None:
            keys[rows] = race.keys
            inverse_temperatures[rows] = race.inverse_temperature


def races_on(device: torch.device, num_rows: int, found: RacesOfRows) -> torch.Tensor:
    """``[2, num_rows]``.  Both rows lie at multiples of 16 bytes: for other addresses a kernel
    would be compiled once more."""
    races = np.empty((2, num_rows + num_rows % 2), np.int64)
    write_races(found, races)
    return torch.from_numpy(races).to(device)[:, :num_rows]
