"""One memory limit for the databases of many namespaces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from hdserve.databases.sizes import Sizes

MIN_PART_BYTES = 3 << 13
"""A namespace that has no more than this gives nothing up for others."""

SHARE = 4
"""A namespace that gives way gives up about one part in this many, so that one text never makes
more than a few give way, and the next texts of about the same size none."""

MAX_SPARE_BYTES = 1 << 16
LARGE_SHARE = 32
"""The least that a namespace gives up: one part in ``SHARE``, but no more than ``MAX_SPARE_BYTES``
or, if that is larger, one part in ``LARGE_SHARE``."""

FREE_SHARE = 8
"""A namespace that gave way may grow again when one part in this many of the limit is free, or when
another has more than twice its limit."""


class Part(Protocol):
    """The database of one namespace.

    Attributes:
        max_bytes: its current limit.
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


class ByteBudget(Generic[PartT]):
    """Parts, one for each namespace, that together stay within a limit.

    The largest gives way first, step by step, or one that is at most an eighth smaller: a
    namespace's data is safe from others as long as it is smaller than theirs.  Whole namespaces are
    dropped, least recently used first, only when there are so many that none has more than
    ``MIN_PART_BYTES``.

    Args:
        max_bytes: the limit; a new part may take all of it.
        on_change: called whenever a part is added, removed or limited; once for all that give way
            to one text.

    Attributes:
        num_given_up: contexts that namespaces gave up for others.
        num_dropped: namespaces dropped to make room.
    """

    def __init__(self, max_bytes: int, on_change: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self._on_change = on_change
        self.num_given_up = 0
        self.num_dropped = 0
        self._parts: OrderedDict[str, PartT] = OrderedDict()
        self._sizes = Sizes()

    @property
    def num_bytes(self) -> int:
        """Memory in use, as of the last :meth:`note` of each part; while there is only one, its
        present size."""
        self._measure_only()
        return self._sizes.total

    def _measure_only(self) -> None:
        if len(self._parts) == 1:
            self._measure(*self._parts)

    def _measure(self, namespace: str) -> None:
        self._sizes.set(namespace, self._parts[namespace].num_bytes)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces, the least recently used first."""
        return tuple(self._parts)

    def __iter__(self) -> Iterator[PartT]:
        return iter(self._parts.values())

    def get(self, namespace: str) -> PartT | None:
        return self._parts.get(namespace)

    def use(self, namespace: str, make: Callable[[int], PartT]) -> PartT:
        """The part of a namespace, to be added to; call :meth:`note` afterwards.

        Args:
            make: creates a part that may take the given number of bytes.
        """
        part = self._parts.get(namespace)
        if part is None:
            part = make(self.max_bytes)
            self._measure_only()
            self._on_change()
            self._parts[namespace] = part
        elif part.max_bytes < self.max_bytes:
            self._let_grow(namespace, part)
        self._parts.move_to_end(namespace)
        return part

    def _let_grow(self, namespace: str, part: PartT) -> None:
        num_free = self.max_bytes - self.num_bytes
        allowed, most = part.max_bytes, self._sizes.most
        if num_free > self.max_bytes // FREE_SHARE:
            allowed = min(self.max_bytes, self._sizes[namespace] + num_free)
        if most > 2 * part.max_bytes:
            allowed = max(allowed, most)
        if allowed > part.max_bytes:
            self._on_change()
            part.limit(allowed)

    def note(self, namespace: str) -> None:
        """A part may have grown: make room for it, if there are others."""
        if len(self._parts) > 1:
            self._measure(namespace)
            if self._sizes.total > self.max_bytes:
                self._on_change()
                self._make_room()

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes and len(self._parts) > 1:
            largest, next_size = self._sizes.largest()
            if self._sizes[largest] > MIN_PART_BYTES:
                self._shrink(largest, next_size)
            else:
                self.num_dropped += 1
                self._forget(next(iter(self._parts)))

    def _shrink(self, namespace: str, next_size: int) -> None:
        """Make one of the largest parts give up the excess, but no more than brings it down to the
        size of the next one, or than one part in ``SHARE``."""
        part, size = self._parts[namespace], self._sizes[namespace]
        share = size // SHARE
        least = max(min(share, MAX_SPARE_BYTES), size // LARGE_SHARE)
        most = max(size - next_size, share)
        less = max(min(self.num_bytes - self.max_bytes, most), least)
        self.num_given_up += part.limit(max(MIN_PART_BYTES - MIN_PART_BYTES // SHARE, size - less))
        self._sizes.set(namespace, part.num_bytes)

    def drop(self, namespace: str) -> None:
        """Forget a namespace."""
        self._on_change()
        self._forget(namespace)

    def _forget(self, namespace: str) -> None:
        self._parts.pop(namespace, None)
        self._sizes.remove(namespace)

    def clear(self) -> None:
        """Forget all namespaces."""
        self._on_change()
        self._parts.clear()
        self._sizes = Sizes()
