"""Sequences that keep the slots of an engine full."""

from __future__ import annotations

import time
from collections.abc import Callable

from hdserve.bench.checked_step import checked_step
from hdserve.core import DraftCounts, Sequence
from hdserve.engine.engine import Engine


class SteadyBatch:
    """Decodes ``size`` sequences at a time from the first token to the last: as some end, others
    start.

    Otherwise the last sequences would run in ever smaller batches, and for longer with drafts than
    plain sequences, which all end together.

    Args:
        engine: must be otherwise idle.
        begin: adds sequence number 0, 1, ... to the engine, to end after a share of its tokens,
            above 0 and at most 1.

    Attributes:
        sequences: those that were started, or ran after :meth:`lead_in`.
        num_tokens: how many were decoded since then.
        most_waiting: most sequences that waited during a step since then.
        num_begun: how many sequences were started in total.

    Its methods raise :class:`~hdserve.errors.HdserveError` if a sequence fails.
    """

    def __init__(self, engine: Engine, size: int, begin: Callable[[int, float], Sequence]) -> None:
        self.sequences: list[Sequence] = []
        self.num_tokens = 0
        self.most_waiting = 0
        self.num_begun = 0
        self._engine = engine
        self._size = size
        self._begin = begin
        self._num_open = 0

    def lead_in(self) -> None:
        """Bring slots to different points of their answers, and start counting there.

        ::

            slot 0  =====|==========:==========|
            slot 1  ==========|=====:===============|    : counted from here: as much is left
            slot 2  ===============|:====                  of prompts that went through before
            slot 3  ================:====|                 as will be in the end

        Sequences that start together would also end together if each step gives each one token.  A
        batch of plain sequences that ends just then would have started fewer prompts for its tokens
        than one whose sequences are at different points.
        """
        starting = [self._open((number + 1) / self._size) for number in range(self._size - 1)]
        while any(seq.finish_reason is None for seq in starting):
            self._step()
        self.sequences = [seq for seq in self.sequences if seq.finish_reason is None]
        for seq in self.sequences:
            seq.counts = DraftCounts()
        self.num_tokens = self.most_waiting = 0

    def decode(self, num_tokens: int, seconds: float) -> None:
        """Take steps until there are ``num_tokens`` tokens, or for that long; at least one."""
        ends_s = time.perf_counter() + seconds
        while self.num_tokens < num_tokens:
            self._step()
            if time.perf_counter() >= ends_s:
                break

    def close(self) -> None:
        """End the sequences that still run."""
        for seq in self.sequences:
            if seq.finish_reason is None:
                self._engine.abort(seq.request_id)

    def _open(self, share: float = 1.0) -> Sequence:
        seq = self._begin(self.num_begun, share)
        self.sequences.append(seq)
        self.num_begun += 1
        self._num_open += 1
        return seq

    def _step(self) -> None:
        while self._num_open < self._size:
            self._open()
        for output in checked_step(self._engine):
            self.num_tokens += len(output.token_ids)
            self._num_open -= output.finish_reason is not None
        self.most_waiting = max(self.most_waiting, self._engine.stats.num_waiting)
