"""Lists of whole answers that may be long."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, overload

from deployments.generation import TokenInfo

T = TypeVar("T")
Item = TypeVar("Item")


class LongList(Sequence[Item], Generic[T, Item]):
    """A list whose items are made when they are looked at: a million objects would take half a
    gigabyte, and hold up everything for seconds each time the interpreter looks for garbage.

    Args:
        make: makes an item of one of ``values``.
    """

    def __init__(self, values: Sequence[T], make: Callable[[T], Item]) -> None:
        self._values = values
        self._make = make

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(value) for value in self._values[index]]
        return self._make(self._values[index])


class PackedTokens(LongList[bytes, TokenInfo]):
    """Tokens with their log probabilities, as bytes until they are looked at."""

    def __init__(self, tokens: Iterable[TokenInfo] = ()) -> None:
        self._packed: list[bytes] = []
        super().__init__(self._packed, pickle.loads)
        self.add(tokens)

    def add(self, tokens: Iterable[TokenInfo]) -> None:
        """Append tokens."""
        if isinstance(tokens, PackedTokens):
            self._packed += tokens._packed
        else:
            self._packed += [pickle.dumps(token, pickle.HIGHEST_PROTOCOL) for token in tokens]
