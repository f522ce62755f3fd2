"""Which of many things is about the largest, without looking at all of them."""

from __future__ import annotations

from collections import OrderedDict
from heapq import nlargest
from itertools import islice

_CLASS_BITS = 4
"""Sizes of one class have so many first bits in common: they differ by an eighth at most."""


class Sizes:
    """The sizes of things by name, and their sum.

    Names are kept apart by the class of their size.  There are few classes, so that what is said of
    the largest takes as long for ten thousand as for ten.

    Attributes:
        total: all sizes together.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[str, int] = {}
        self._classes: dict[int, OrderedDict[str, None]] = {}

    def __getitem__(self, name: str) -> int:
        """The size of a thing, 0 while there is none."""
        return self._sizes.get(name, 0)

    def set(self, name: str, size: int) -> None:
        """Note what size a thing has now."""
        self.remove(name)
        self.total += size
        self._sizes[name] = size
        self._classes.setdefault(_class_of(size), OrderedDict())[name] = None

    def remove(self, name: str) -> None:
        """Forget a thing, if there is one of this name."""
        size = self._sizes.pop(name, None)
        if size is None:
            return
        self.total -= size
        members = self._classes[_class_of(size)]
        del members[name]
        if not members:
            del self._classes[_class_of(size)]

    def largest(self) -> tuple[str, int]:
        """One of those of the largest class, the first that came to it, and the size of the next
        one of that class, or of the class below it; 0 where there is no other.

        There must be at least one.
        """
        first, *below = nlargest(2, self._classes)
        name, *others = islice(self._classes[first], 2)
        others += [next(iter(self._classes[each])) for each in below]
        return name, self[others[0]] if others else 0


def _class_of(size: int) -> int:
    """Larger for larger sizes; the number of bits and the first of them."""
    num_bits = size.bit_length()
    return (num_bits << _CLASS_BITS) | (size >> max(0, num_bits - _CLASS_BITS))
