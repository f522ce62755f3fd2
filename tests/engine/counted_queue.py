"""Queues of sequences that count how many of them are looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hdserve.core import Sequence


class CountedQueue(OrderedDict[Sequence, None]):
    """Counts the sequences that were looked at one after the other."""

    num_read = 0

    def __iter__(self) -> Iterator[Sequence]:
        for seq in super().__iter__():
            self.num_read += 1
            yield seq
