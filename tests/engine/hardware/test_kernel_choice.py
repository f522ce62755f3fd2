"""A kernel is used up to as many rows as it is tried to be faster for."""

from __future__ import annotations

import pytest
import torch

from hdserve.engine.hardware.kernel_choice import max_rows_faster


def work(amount: int) -> None:
    for _ in range(max(0, amount)):
        torch.ones(20_000).sum()


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (4, 4), (9, 8), (100, 16)])
def test_the_last_count_before_the_first_that_is_slower(limit: int, found: int) -> None:
    """Ours does 20 times the other's work beyond the limit, and none up to there."""
    counts = (4, 8, 16)

    def ours(count: int) -> None:
        work(300 if count > limit else 0)

    assert max_rows_faster(counts, ours, lambda _count: work(15)) == found
