"""Which sequences take part in the next step, and with how many rows each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hdserve.core import Sequence
from hdserve.engine.kv_cache import KVCache, Segment


@dataclass(slots=True, eq=False)
class Slot:
    """A running sequence and its place in the cache."""

    seq: Sequence
    segment: Segment


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one slot does in a step.

    Attributes:
        num_tokens: decided tokens that go through the model.
        is_choosing: whether they reach the last decided token, so that a token is chosen and
            drafts may hang on it.
    """

    slot: Slot
    num_tokens: int
    is_choosing: bool


class Scheduler:
    """Admits sequences in the order of arrival and splits prompts into chunks.

    A sequence is admitted when there is a slot and a segment for all tokens it may ever have, so
    memory never runs out later.  Every decoding sequence takes part in every step; prompts share
    ``prefill_chunk_tokens`` rows a step, oldest first, so a long prompt does not stall the others.

    Args:
        num_extra_rows: rows a segment has beyond the sequence's longest length, for its drafts.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_sequences: int,
        prefill_chunk_tokens: int,
        num_extra_rows: int,
    ) -> None:
        self._cache = cache
        self._max_num_sequences = max_num_sequences
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._num_extra_rows = num_extra_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Slot] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of the longest sequence the cache could hold if it were alone."""
        return self._cache.num_rows - self._num_extra_rows

    def add(self, seq: Sequence) -> None:
        """Queue ``seq``, which must fit."""
        fits = seq.max_total_tokens <= self.max_total_tokens
        assert fits, "a sequence larger than the cache was queued"
        self.waiting.append(seq)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to slots as far as there is room; the first that does not fit
        keeps those behind it waiting."""
        admitted = []
        while self.waiting and len(self.running) < self._max_num_sequences:
            segment = self._cache.allocate(self._num_rows(self.waiting[0]))
            if segment is None:
                break
            seq = self.waiting.popleft()
            self.running.append(Slot(seq, segment))
            admitted.append(seq)
        return admitted

    def schedule(self) -> list[Scheduled]:
        """The next step's work, in slot order."""
        return list(self._schedule())

    def _schedule(self) -> Iterator[Scheduled]:
        num_prefill_tokens = self._prefill_chunk_tokens
        for slot in self.running:
            num_pending = slot.seq.num_pending_tokens
            if num_pending == 1:
                yield Scheduled(slot, 1, is_choosing=True)
            elif num_prefill_tokens > 0:
                num_tokens = min(num_pending, num_prefill_tokens)
                num_prefill_tokens -= num_tokens
                yield Scheduled(slot, num_tokens, is_choosing=num_tokens == num_pending)

    def release(self, slot: Slot) -> None:
        """Free the slot and the segment of a sequence that has ended."""
        self.running.remove(slot)
        self._cache.free(slot.segment)

    def _num_rows(self, seq: Sequence) -> int:
        return seq.max_total_tokens + self._num_extra_rows
