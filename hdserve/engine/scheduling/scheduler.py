"""Which sequences take part in the next step, and with how many rows each."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from hdserve.core import Sequence
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.kv_cache.prefix_cache import KeyedTokens, PrefixCache
from hdserve.engine.kv_cache.segments import Owned, Segment, align
from hdserve.engine.scheduling.prefill_pace import PrefillPace

MAX_CHUNK_SCORES = 1 << 22
"""The most tokens of a chunk times the tokens they attend to: a mask of 16 MiB in float32."""

GROWTH_TOKENS = 256
_GROWTH_SHARE = 8
"""A sequence gets room for ``GROWTH_TOKENS`` more tokens at a time, or for one in this many of its
tokens, if that is more.  Moving a sequence costs as much as it has tokens, so each token is moved a
bounded number of times."""


MIN_AWAITED_TOKENS = 256
"""A prompt waits for another one that is computing at least this many tokens of the same beginning:
at least a chunk, which both would otherwise compute in turn."""

_MAX_REUSED_TOKENS = 1 << 16
"""Once admitted sequences reuse this many tokens, others wait for the next step: keys and values
are copied, and drafters read the tokens, while running sequences stand still."""


@dataclass(slots=True, eq=False)
class Slot:
    """A running sequence and its place in the cache.

    Attributes:
        is_offered: whether its prompt was offered for reuse, but for its last token at most, or
            never will be.
        num_offered_tokens: of its prompt, offered for reuse before all of it is cached.
        awaited: how many tokens of its prompt other sequences wait for; 0 for those that do not.
        leaves_nothing: whether nobody may reuse its rows, as they may hold NaN or infinity.
        is_plain: whether it is decoded without drafts, because one led to non-finite values.
    """

    seq: Sequence
    segment: Segment
    is_offered: bool = False
    num_offered_tokens: int = 0
    awaited: dict[Sequence, int] = field(default_factory=dict)
    leaves_nothing: bool = False
    is_plain: bool = False


class Scheduled(NamedTuple):
    """What one slot does in a step.

    Attributes:
        num_tokens: decided tokens that go through the model.
        is_choosing: whether they include the last decided token, so that a token is chosen and
            drafts may follow.
        num_scored_tokens: how many of them, from the first, need logits for prompt logprobs.
    """

    slot: Slot
    num_tokens: int
    is_choosing: bool
    num_scored_tokens: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether only one token is pending; one token of a longer prompt counts as a chunk."""
        return self.num_tokens == 1 and self.is_choosing

    @property
    def may_draft(self) -> bool:
        """Whether a draft that leads to non-finite values could be retried without drafts."""
        return not self.slot.is_plain and not self.num_scored_tokens


class Scheduler:
    """Admits sequences in the order of arrival and splits prompts into chunks.

    A sequence is admitted when there is a slot, and rows for its tokens and some more; it grows as
    it is decoded.  When no rows are left the youngest is preempted: it waits first in line and
    later continues with the tokens it has, some of whose keys and values may still be cached.  A
    sequence whose prompt is scored has all its rows from the beginning, and is never preempted.  So
    memory never runs out, some sequence always advances, and tokens a request might generate, but
    does not, take no room from others::

        rows   |aaaaaaa++ |bbbb++    |ccccccc++ |    + room to grow
               |aaaaaaaaaaaaa++ |bbbbbb++       |    a has moved c out of the way

    If the free rows are not contiguous, running sequences are moved together.  Every decoding
    sequence takes part in every step; prompts share as many rows of it as ``pace`` allows, oldest
    first, so a long prompt does not stall the others; far into a very long prompt chunks get
    shorter where attention needs a mask, so that memory stays bounded.

    Args:
        prefixes: provides the segments.
        max_draft_tokens: rows a segment has for drafts, beyond those of its tokens.
        max_scored_tokens: most prompt tokens of a step that have logits, so that memory stays
            bounded.
        shapes: how forwards are padded.
        growth_tokens: a sequence has room for at least this many tokens beyond those it has, unless
            it ends before.
        max_chunk_scores: most tokens of a chunk times the tokens they attend to; ``None`` where no
            mask is made of them.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        *,
        max_num_sequences: int,
        pace: PrefillPace,
        max_draft_tokens: int,
        max_scored_tokens: int,
        shapes: Shapes,
        growth_tokens: int = GROWTH_TOKENS,
        max_chunk_scores: int | None = MAX_CHUNK_SCORES,
    ) -> None:
        self._prefixes = prefixes
        self._max_num_sequences = max_num_sequences
        self._pace = pace
        self._max_draft_tokens = max_draft_tokens
        self._max_scored_tokens = max_scored_tokens
        self._shapes = shapes
        self._growth_tokens = growth_tokens
        self._max_chunk_scores = max_chunk_scores
        self._num_drafts = 0
        """Of the last step."""
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        """First in line first; any of thousands is taken out at once."""
        self.running: list[Slot] = []
        self._keyed_tokens: dict[Sequence, KeyedTokens] = {}
        """Of sequences whose prompts are not offered yet, once they were needed; what running ones
        add to them is missing."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output of the longest sequence the cache could hold if it were alone."""
        return self._prefixes.cache.num_rows - self._max_draft_tokens

    @property
    def usage(self) -> float:
        """The share of the cache's rows that belong to running sequences, 0 to 1."""
        return self._prefixes.usage

    def add(self, seq: Sequence) -> None:
        """Queue ``seq``, which must fit."""
        fits = seq.max_total_tokens <= self.max_total_tokens
        assert fits, "a sequence larger than the cache was queued"
        self.waiting[seq] = None

    def withdraw(self, seq: Sequence) -> None:
        """Take a waiting sequence out of the queue."""
        del self.waiting[seq]
        self._keyed_tokens.pop(seq, None)

    def make_room(self) -> list[Sequence]:
        """Let sequences grow that have no room for the drafts of a step, the oldest first.

        Returns:
            Those that were preempted to make room.
        """
        preempted: list[Sequence] = []
        for slot in [*self.running]:
            num_needed = len(slot.seq.token_ids) + self._max_draft_tokens
            while slot.segment.num_rows < num_needed and slot in self.running:
                if not self._grow(slot):
                    preempted.append(self._preempt_youngest())
        return preempted

    def _preempt_youngest(self) -> Sequence:
        """Preempt the youngest sequence that can continue later; others get its rows when they need
        them."""
        slot = next(slot for slot in reversed(self.running) if not slot.seq.scores_prompt)
        self.release(slot)
        slot.seq.num_cached_tokens = 0
        self.waiting[slot.seq] = None
        self.waiting.move_to_end(slot.seq, last=False)
        return slot.seq

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to slots as far as there is room.

        One that does not fit blocks those after it; a choice that waits for another choice of its
        prompt blocks nobody, and a prompt that waits for its beginning reserves a slot.
        """
        admitted: list[Sequence] = []
        num_kept_slots = num_reused_tokens = 0
        for seq in self.waiting:
            if len(self.running) + num_kept_slots == self._max_num_sequences:
                break
            if num_reused_tokens >= _MAX_REUSED_TOKENS:
                break
            if self._waits_for_choice(seq):
                continue
            if self._waits_for_beginning(seq):
                num_kept_slots += 1
                continue
            num_rows = self._num_rows(seq)
            placed = self._place(seq, num_rows)
            if placed is None and self._prefixes.has_room_in_parts(num_rows):
                self._compact(num_rows)
                placed = self._place(seq, num_rows)
            if placed is None:
                break
            segment, seq.num_cached_tokens = placed
            num_reused_tokens += seq.num_cached_tokens
            is_offered = seq.num_cached_tokens >= seq.num_prompt_tokens - 1
            self.running.append(Slot(seq, segment, is_offered=is_offered))
            admitted.append(seq)
        for seq in admitted:  # which would go on waiting if this was interrupted before
            del self.waiting[seq]
        return admitted

    def _num_rows(self, seq: Sequence) -> int:
        """Rows for the tokens of ``seq``, some more, and drafts; if its prompt is scored, which
        cannot be restarted, all rows it may ever need."""
        num_tokens = seq.max_total_tokens
        if not seq.scores_prompt:
            num_known = len(seq.token_ids)
            room = max(self._growth_tokens, num_known // _GROWTH_SHARE)
            num_tokens = min(num_tokens, num_known + room)
        return num_tokens + self._max_draft_tokens

    def _grow(self, slot: Slot) -> bool:
        num_rows = self._num_rows(slot.seq)
        grown = self._prefixes.grow(slot.segment, slot.seq.num_cached_tokens, num_rows)
        if grown is not None:
            slot.segment = grown
            return True
        if not self._prefixes.has_room_in_parts(align(num_rows) - slot.segment.num_rows):
            return False
        self._compact(growing=slot)
        return True

    def _place(self, seq: Sequence, num_rows: int) -> tuple[Segment, int] | None:
        prompt = self._keyed(seq) if self.looks_up(seq) else KeyedTokens.of((), seq.namespace)
        is_shared = seq.speculation.is_output_shared
        return self._prefixes.place(prompt, num_rows, is_shared=is_shared)

    def looks_up(self, seq: Sequence) -> bool:
        """Whether a cached beginning of the prompt is reused; a prompt that is scored needs logits,
        which cached rows do not give."""
        return self._prefixes.is_enabled and not seq.scores_prompt

    def _waits_for_choice(self, seq: Sequence) -> bool:
        """Whether another choice of the same prompt is computing it, so that ``seq`` can use its
        log probabilities, or its keys and values."""
        shared = seq.prompt_scores
        if shared is None:
            return False
        others = [slot for slot in self.running if slot.seq.prompt_scores is shared]
        if seq.scores_prompt:
            return bool(others)
        is_reused = seq.speculation.is_output_shared and self._prefixes.keeps(seq.num_prompt_tokens)
        return is_reused and not all(slot.is_offered for slot in others)

    def _waits_for_beginning(self, seq: Sequence) -> bool:
        """Whether another sequence is computing the beginning of the same prompt.

        Prompts are computed oldest first, so computing it a second time would take longer::

            running   d d d d d d d d a a a
            waiting   d d d d d d d d b b      until all of d is there
        """
        waits = False
        for slot in self.running:
            num_tokens = 0 if slot.is_offered else self._num_awaited(seq, slot)
            if num_tokens > slot.seq.num_cached_tokens:
                waits = True
            elif num_tokens > slot.num_offered_tokens:
                self._offer_beginning(slot)
        return waits

    def _num_awaited(self, seq: Sequence, slot: Slot) -> int:
        """How many tokens of the prompt of ``slot`` are worth waiting for; computed once."""
        found = slot.awaited.get(seq)
        if found is None:
            found = slot.awaited[seq] = self._num_to_await(seq, slot.seq)
        return found

    def _num_to_await(self, seq: Sequence, other: Sequence) -> int:
        is_shared = seq.speculation.is_output_shared and other.speculation.is_output_shared
        if seq.scores_prompt or not is_shared or seq.namespace != other.namespace:
            return 0
        if not self._prefixes.is_enabled or not _begin_alike(seq, other):
            return 0
        prompt = self._keyed(other).first(other.num_prompt_tokens)
        return self._prefixes.num_to_await(self._keyed(seq), prompt, MIN_AWAITED_TOKENS)

    def _keyed(self, seq: Sequence) -> KeyedTokens:
        """The tokens that ``seq`` had when it came into the queue."""
        found = self._keyed_tokens.get(seq)
        if found is None:
            found = KeyedTokens.of(seq.token_ids, seq.namespace, seq.keyed_prompt)
            self._keyed_tokens[seq] = found
        return found

    def _offer_beginning(self, slot: Slot) -> None:
        """Offer the cached part of the prompt of ``slot`` for reuse."""
        seq = slot.seq
        slot.num_offered_tokens = seq.num_cached_tokens
        cached = self._keyed(seq).first(seq.num_cached_tokens)
        self._prefixes.offer(slot.segment, cached)

    def forget_prefixes(self) -> None:
        """Let nobody reuse what is in the cache now, or what running sequences leave there."""
        self._prefixes.clear()
        for slot in self.running:
            slot.is_offered = slot.leaves_nothing = True

    def forget_step_times(self) -> None:
        """Forget step times: steps take a different time from now on."""
        self._pace.reset()

    def reset(self) -> None:
        """Empty the cache and end all running sequences, whatever state they are in."""
        self.running.clear()
        self._keyed_tokens.clear()
        self._prefixes.reset()

    def _compact(self, num_rows: int = 0, growing: Slot | None = None) -> None:
        """Move the sequences so that ``num_rows`` free rows are contiguous, and ``growing`` has
        more room; where there is one, those that need more next have it, too, as far as free rows
        last, as all would move again for them."""
        more = {} if growing is None else self._room_after_move(growing)
        owned = [
            Owned(
                slot.segment,
                slot.seq.num_cached_tokens,
                slot.segment.num_rows + more.get(slot, 0),
            )
            for slot in self.running
        ]
        moved = self._prefixes.compact(owned, num_rows)
        for slot, segment in zip(self.running, moved, strict=True):
            slot.segment = segment

    def _room_after_move(self, growing: Slot) -> dict[Slot, int]:
        """How many more rows ``growing`` gets, and others that have little room left."""
        found = {growing: align(self._num_rows(growing.seq)) - growing.segment.num_rows}
        num_left = self._prefixes.cache.rows.num_free - found[growing]
        others = [slot for slot in self.running if slot is not growing]
        for slot in sorted(others, key=_num_spare_rows):
            num_more = align(self._num_rows(slot.seq)) - slot.segment.num_rows
            if num_more > num_left:
                break  # those behind it would take what it may still have
            found[slot] = max(0, num_more)
            num_left -= found[slot]
        return found

    def schedule(self) -> list[Scheduled]:
        """The next step's work, in slot order."""
        num_decoding = sum(slot.seq.num_pending_tokens == 1 for slot in self.running)
        num_left = self._num_prompt_tokens(num_decoding)
        num_left_to_score = self._max_scored_tokens
        scheduled: list[Scheduled] = []
        for slot in self.running:
            seq, num_scored_tokens = slot.seq, 0
            num_tokens = num_pending = seq.num_pending_tokens
            if num_pending > 1:
                num_tokens = min(num_pending, num_left, self._most_chunk_tokens(seq))
                if seq.scores_prompt:
                    num_tokens = min(num_tokens, num_left_to_score)
                    num_left_to_score -= num_tokens
                    num_scored_tokens = min(num_tokens, num_pending - 1)
                num_left -= num_tokens
            if num_tokens:
                is_choosing = num_tokens == num_pending
                scheduled.append(Scheduled(slot, num_tokens, is_choosing, num_scored_tokens))
        return scheduled

    def _most_chunk_tokens(self, seq: Sequence) -> int:
        """The most tokens of a chunk such that each may attend to everything before the chunk and
        in it."""
        if self._max_chunk_scores is None:
            return seq.num_pending_tokens
        half = seq.num_cached_tokens / 2
        return max(1, int(sqrt(half * half + self._max_chunk_scores) - half))

    def _num_prompt_tokens(self, num_decoding: int) -> int:
        """Most prompt tokens of the next step.  If more are pending than the pace allows, and a
        smaller forward without padding has room for half of those, only these: the padding would
        take as long as the rest, which the next step takes."""
        num_prompts = len(self.running) - num_decoding
        if not num_prompts:
            return 0
        allowed = self._pace.num_tokens(num_decoding, num_prompts)
        num_pending = sum(slot.seq.num_pending_tokens for slot in self.running) - num_decoding
        if num_pending <= allowed:
            return allowed
        num_others = num_decoding + self._num_drafts
        filling = self._shapes.fill_rows(num_others + allowed) - num_others
        return filling if 2 * filling >= allowed else allowed

    def took(self, scheduled: list[Scheduled], seconds: float, num_drafts: int = 0) -> None:
        """Learn how long the step took, and how many rows of it were drafts."""
        self._num_drafts = num_drafts
        num_decoding = sum(work.is_decoding for work in scheduled)
        if num_decoding:
            num_prompt_tokens = sum(work.num_tokens for work in scheduled if not work.is_decoding)
            self._pace.observe(num_decoding, num_prompt_tokens, seconds)

    def offer(self, slot: Slot) -> None:
        """Offer the prompt of ``slot``, which is now cached, for reuse."""
        seq = slot.seq
        if self._offers(slot):
            prompt = self._keyed(seq).first(seq.num_prompt_tokens)
            self._prefixes.offer(slot.segment, prompt)
        slot.is_offered = True
        slot.awaited.clear()
        self._keyed_tokens.pop(seq, None)

    def _offers(self, slot: Slot) -> bool:
        is_shared = slot.seq.speculation.is_output_shared
        return self._prefixes.is_enabled and is_shared and not slot.is_offered

    def release(self, slot: Slot) -> None:
        """Free the slot of a sequence that has ended; its segment is freed when it is needed."""
        self.running.remove(slot)
        seq = slot.seq
        self._keyed_tokens.pop(seq, None)
        is_kept = seq.speculation.is_output_shared and not slot.leaves_nothing
        namespace = seq.namespace if is_kept else None
        self._prefixes.release(slot.segment, seq.token_ids[: seq.num_cached_tokens], namespace)


def _num_spare_rows(slot: Slot) -> int:
    return slot.segment.num_rows - len(slot.seq.token_ids)


def _begin_alike(seq: Sequence, other: Sequence) -> bool:
    """Whether so much of two prompts is equal that waiting might be worth it."""
    if min(len(seq.token_ids) - 1, other.num_prompt_tokens) < MIN_AWAITED_TOKENS:
        return False
    return seq.token_ids[:MIN_AWAITED_TOKENS] == other.token_ids[:MIN_AWAITED_TOKENS]
