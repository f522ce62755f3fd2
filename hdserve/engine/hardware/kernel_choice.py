"""Up to how many rows our kernel is faster than the library's on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_NUM_ROUNDS = 3


def max_rows_faster(
    counts: Sequence[int], ours: Callable[[int], object], theirs: Callable[[int], object]
) -> int:
    """The largest of the ascending ``counts`` up to which our kernel is never slower; 0 if it is
    slower at the first one.  The rounds are interleaved, and the fastest of each counts."""
    found = 0
    for count in counts:
        best = [float("inf"), float("inf")]
        for _ in range(_NUM_ROUNDS):
            for index, run in enumerate((ours, theirs)):
                started = time.perf_counter()
                run(count)
                best[index] = min(best[index], time.perf_counter() - started)
        if best[0] > best[1]:
            break
        found = count
    return found
