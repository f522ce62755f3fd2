"""Which of many things is about the largest, found without looking at all of them."""

from __future__ import annotations

from collections import OrderedDict
from heapq import nlargest
from itertools import islice

_CLASS_BITS = 4
"""Sizes of one class share this many leading bits: they differ by at most an eighth."""


class Sizes:
    """The sizes of things by name, and their sum.

    Names are grouped by the class of their size.  There are few classes, so finding the largest
    takes as long for ten thousand names as for ten.

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

    @property
    def most(self) -> int:
        """About the largest size, at most an eighth less; there must be at least one."""
        return self[next(iter(self._classes[max(self._classes)]))]

    def set(self, name: str, size: int) -> None:
        """Set the current size of a thing."""
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
        """The first member of the largest class, and the size of the next member, or, if there is
        none, of a member of the next lower class; 0 if there is no other.

        There must be at least one.
        """
        first, *below = nlargest(2, self._classes)
        name, *others = islice(self._classes[first], 2)
        others += [next(iter(self._classes[each])) for each in below]
        return name, self[others[0]] if others else 0


def _class_of(size: int) -> int:
    """Larger for larger sizes: the number of bits, then the leading bits."""
    num_bits = size.bit_length()
    return (num_bits << _CLASS_BITS) | (size >> max(0, num_bits - _CLASS_BITS))
