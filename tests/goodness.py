"""How well counts fit a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MIN_EXPECTED = 5.0


def chi_square_p_value(observed: Sequence[int], probabilities: Sequence[float]) -> float:
    """The p-value of Pearson's chi-square test (Pearson 1900).

    Cells of fewer than five expected counts are pooled into one.

    Args:
        probabilities: one per cell of ``observed``; normalised here.
    """
    total, whole = sum(observed), sum(probabilities)
    cells: list[tuple[float, float]] = []
    rare_observed = rare_expected = 0.0
    for count, probability in zip(observed, probabilities, strict=True):
        expected = total * probability / whole
        if expected < _MIN_EXPECTED:
            rare_observed, rare_expected = rare_observed + count, rare_expected + expected
        else:
            cells.append((count, expected))
    if rare_expected:
        cells.append((rare_observed, rare_expected))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
