"""Sequences that keep the slots of an engine full."""

from __future__ import annotations

import time
from collections.abc import Callable

from hdserve.core import Sequence
from hdserve.engine.engine import Engine


class SteadyBatch:
    """Decodes ``size`` sequences at a time from the first token to the last: as some end, others
    begin.

    Without that the last sequences would decode with fewer and fewer beside them, drafted ones
    longer than plain ones, which all end together.

    Args:
        engine: has nothing else to do.
        begin: adds sequence number 0, 1, ... to the engine.

    Attributes:
        sequences: those that were begun.
        num_tokens: how many were decoded.
    """

    def __init__(self, engine: Engine, size: int, begin: Callable[[int], Sequence]) -> None:
        self.sequences: list[Sequence] = []
        self.num_tokens = 0
        self._engine = engine
        self._size = size
        self._begin = begin
        self._num_open = 0

    def decode(self, num_tokens: int, seconds: float) -> None:
        """Take steps until there are ``num_tokens`` tokens, or for so long; one at least."""
        ends_s = time.perf_counter() + seconds
        while self.num_tokens < num_tokens:
            while self._num_open < self._size:
                self.sequences.append(self._begin(len(self.sequences)))
                self._num_open += 1
            for output in self._engine.step():
                self.num_tokens += len(output.token_ids)
                self._num_open -= output.finish_reason is not None
            if time.perf_counter() >= ends_s:
                break

    def close(self) -> None:
        """End what has not ended."""
        for seq in self.sequences:
            if seq.finish_reason is None:
                self._engine.abort(seq.request_id)
