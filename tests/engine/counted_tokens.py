"""Token ids that count how often they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class CountedTokens(list[int]):
    """Counts how many of them were read, in slices and all at once."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 0
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()
