"""One bound for the databases of many namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

MIN_PART_BYTES = 1 << 14
"""A namespace that has no more than this gives nothing up for others."""

STEP = 32
"""A namespace that gives way gives up at least one part in this many, so that it seldom has to."""

FREE_SHARE = 8
"""A namespace that gave way may grow again when one part in this many of the room is free."""


class Part(Protocol):
    """What one namespace has.

    Attributes:
        max_bytes: what it takes at most, now.
    """

    max_bytes: int

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        ...

    def limit(self, max_bytes: int) -> int:
        """Take no more than ``max_bytes`` from now on; returns how many contexts were given up."""
        ...


PartT = TypeVar("PartT", bound=Part)


class Room(Generic[PartT]):
    """Parts by namespace that together keep to a bound.

    The largest gives way first, a little at a time: what a namespace has is safe from others as
    long as it is smaller than theirs.  Whole namespaces are dropped, least recently used first,
    only when there are so many that none has more than ``MIN_PART_BYTES``.

    Args:
        max_bytes: the bound; a new part may take all of it.
        on_change: called whenever a part came, went or was limited.

    Attributes:
        num_bytes: memory in use, as far as it was noted.
        num_given_up: contexts that namespaces gave up for others.
        num_dropped: namespaces dropped to make room.
    """

    def __init__(self, max_bytes: int, on_change: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self._on_change = on_change
        self.num_bytes = 0
        self.num_given_up = 0
        self.num_dropped = 0
        self._parts: dict[str, PartT] = {}
        self._sizes: dict[str, int] = {}

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces, the least recently used first."""
        return tuple(self._parts)

    def __iter__(self) -> Iterator[PartT]:
        return iter(self._parts.values())

    def get(self, namespace: str) -> PartT | None:
        return self._parts.get(namespace)

    def use(self, namespace: str, make: Callable[[int], PartT]) -> PartT:
        """The part of a namespace, to be fed; :meth:`note` what became of it.

        Args:
            make: makes a part that may take so many bytes.
        """
        part = self._parts.get(namespace)
        if part is None:
            part = make(self.max_bytes)
            self._on_change()
        elif part.max_bytes < self.max_bytes:
            self._let_grow(namespace, part)
        self._parts.pop(namespace, None)
        self._parts[namespace] = part
        return part

    def _let_grow(self, namespace: str, part: PartT) -> None:
        num_free = self.max_bytes - self.num_bytes
        allowed = min(self.max_bytes, self._sizes.get(namespace, 0) + num_free)
        if num_free > self.max_bytes // FREE_SHARE and allowed > part.max_bytes:
            part.limit(allowed)
            self._on_change()

    def note(self, namespace: str) -> None:
        """A part may have grown: make room for it."""
        size = self._parts[namespace].num_bytes
        self.num_bytes += size - self._sizes.get(namespace, 0)
        self._sizes[namespace] = size
        while self.num_bytes > self.max_bytes and len(self._parts) > 1:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            if self._sizes[largest] > MIN_PART_BYTES:
                self._shrink(largest)
            else:
                self.num_dropped += 1
                self.drop(next(iter(self._parts)))

    def _shrink(self, namespace: str) -> None:
        """Have the largest part give up what there is too much, but not more than makes it as large
        as the next."""
        part, size = self._parts[namespace], self._sizes[namespace]
        next_size = max((self._sizes[name] for name in self._sizes if name != namespace), default=0)
        less = max(min(self.num_bytes - self.max_bytes, size - next_size), size // STEP)
        self.num_given_up += part.limit(max(MIN_PART_BYTES, size - less))
        self._on_change()
        self._sizes[namespace] = part.num_bytes
        self.num_bytes += part.num_bytes - size

    def drop(self, namespace: str) -> None:
        """Forget a namespace."""
        self._on_change()
        self._parts.pop(namespace, None)
        self.num_bytes -= self._sizes.pop(namespace, 0)

    def clear(self) -> None:
        """Forget all namespaces."""
        self._on_change()
        self._parts.clear()
        self._sizes.clear()
        self.num_bytes = 0
