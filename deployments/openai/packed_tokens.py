"""The log probabilities of an answer that is being collected."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, overload

from deployments.generation import TokenInfo


class PackedTokens(Sequence[TokenInfo]):
    """Tokens with their log probabilities, as bytes until they are looked at: a million objects
    take three times the memory, and hold up everything for a second each time the interpreter looks
    for garbage among them."""

    def __init__(self, tokens: Iterable[TokenInfo] = ()) -> None:
        self._packed: list[bytes] = []
        self.add(tokens)

    def add(self, tokens: Iterable[TokenInfo]) -> None:
        """Append tokens."""
        if isinstance(tokens, PackedTokens):
            self._packed += tokens._packed
        else:
            self._packed += [pickle.dumps(token, pickle.HIGHEST_PROTOCOL) for token in tokens]

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> TokenInfo: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenInfo]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [pickle.loads(packed) for packed in self._packed[index]]
        return pickle.loads(self._packed[index])
