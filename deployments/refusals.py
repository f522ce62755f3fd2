"""Which models are full at the moment, so that a storm of requests ends in the gateway."""

from __future__ import annotations

import time
from typing import NamedTuple

from hdserve.errors import GrammarsOverloaded, Overloaded

REMEMBERED_S = 0.05


class _Refusal(NamedTuple):
    num_sequences: int
    until_s: float


class Refusals:
    """Remembers what replicas have just refused; used from one event loop.

    Being asked and refusing takes a replica's time, and clients told to come later may not listen.
    Requests for fewer sequences than were refused are not affected: they may fit.
    """

    def __init__(self, remembered_s: float = REMEMBERED_S) -> None:
        self._remembered_s = remembered_s
        self._last: dict[str, _Refusal] = {}

    def note(self, model: str, num_sequences: int, error: Overloaded) -> None:
        """Note that ``model`` has refused ``num_sequences`` sequences; not if it was for their
        grammar, as others have room."""
        if not isinstance(error, GrammarsOverloaded):
            self._last[model] = _Refusal(num_sequences, time.monotonic() + self._remembered_s)

    def check(self, model: str, num_sequences: int) -> None:
        """Refuse a request that the replicas would refuse.

        Raises:
            Overloaded: this many sequences, or fewer, were refused a moment ago.
        """
        last = self._last.get(model)
        if last and num_sequences >= last.num_sequences and time.monotonic() < last.until_s:
            raise Overloaded
