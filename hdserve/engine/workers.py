"""Threads that share the compiled work of a forward with the thread that runs it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Work = Callable[[int, int, int], object]
"""Does the items from the second number up to the third, as the part with the first number."""


class Workers:
    """As many threads as PyTorch uses, started when work is first shared."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    @staticmethod
    def num_parts(size: int, size_per_part: int) -> int:
        """Into how many parts work of ``size`` is divided."""
        if size < 2 * size_per_part:
            return 1
        return min(torch.get_num_threads(), size // size_per_part)

    def share(self, work: Work, num_items: int, num_parts: int) -> None:
        """Do ``num_items`` items in ``num_parts`` parts, the first one in this thread."""
        if num_parts == 1:
            work(0, 0, num_items)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), "hdserve-forward")
        ends = [num_items * part // num_parts for part in range(num_parts + 1)]
        running = [
            self._threads.submit(work, part, ends[part], ends[part + 1])
            for part in range(1, num_parts)
        ]
        work(0, 0, ends[1])
        for other in running:
            other.result()
