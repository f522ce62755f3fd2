"""Lists of whole answers that may be long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class LongList(Sequence[dict[str, Any] | None], Generic[T]):
    """A list whose items are made when they are looked at: a million objects would take half a
    gigabyte, and hold up everything for seconds each time the interpreter looks for garbage.

    Args:
        make: makes an item of one of ``values``.
    """

    def __init__(self, values: Sequence[T], make: Callable[[T], dict[str, Any] | None]) -> None:
        self._values = values
        self._make = make

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any] | None]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(value) for value in self._values[index]]
        return self._make(self._values[index])
