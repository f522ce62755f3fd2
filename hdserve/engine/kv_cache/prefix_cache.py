"""Keys and values that earlier sequences left, reused for prompts with the same beginning."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter

import numpy as np

from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.row_runs import RowRun, cheapest_part, find_runs
from hdserve.engine.kv_cache.segments import Owned, Segment, align

BLOCK_TOKENS = 32
"""Prefixes are found by whole blocks of this many tokens, then extended token by token."""

_NUM_COMPARED = 8
"""How many of the entries that begin with the same blocks are compared."""

_MAX_MOVED = 4
"""At most this many rows of ended sequences are moved for each row that is wanted."""

_MAX_ENTRIES = 4096
"""Looking for room takes as long as there are entries: 7 ms with so many."""

_NUM_LOOKS = 64
"""Where there are more entries, some are dropped before the next look at where rows may move, which
takes as long as there are entries; so there are at most about this many looks."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyedTokens:
    """Tokens with what finds them: made once for a prompt, however often it is looked up.

    Attributes:
        token_ids: int64 ``[num_tokens]``.
        keys: of the whole blocks; each stands for all tokens up to the end of its block, and for
            the namespace.
        namespace: of the sequence; others do not find these tokens.
    """

    token_ids: np.ndarray
    keys: Sequence[int]
    namespace: str

    @classmethod
    def of(
        cls, token_ids: Sequence[int], namespace: str, known: KeyedTokens | None = None
    ) -> KeyedTokens:
        """The tokens of a sequence; takes time in proportion to how many are not known.

        Args:
            known: the first of ``token_ids``, or all and more, in the same namespace.
        """
        if known is None:
            known = cls(np.empty(0, np.int64), (), namespace)
        known = known.first(len(token_ids))
        others = np.asarray(token_ids[len(known.token_ids) :], np.int64)
        if not len(others):
            return known
        tokens = np.concatenate((known.token_ids, others))
        return cls(tokens, [*known.keys, *_keys(tokens, namespace, known.keys)], namespace)

    def first(self, num_tokens: int) -> KeyedTokens:
        """The first ``num_tokens`` tokens, or all if there are fewer."""
        keys = self.keys[: num_tokens // BLOCK_TOKENS]
        return KeyedTokens(self.token_ids[:num_tokens], keys, self.namespace)

    def num_common(self, other: KeyedTokens) -> int:
        """How many tokens both begin with, as far as keys tell."""
        blocks = range(min(len(self.keys), len(other.keys)))
        num_blocks = bisect_left(blocks, True, key=lambda i: self.keys[i] != other.keys[i])
        return self.num_common_after(num_blocks, other.token_ids)

    def num_common_after(self, num_blocks: int, token_ids: np.ndarray) -> int:
        """How many tokens both begin with, if the first ``num_blocks`` blocks are equal, and the
        next ones are not."""
        start = num_blocks * BLOCK_TOKENS
        block = slice(start, start + BLOCK_TOKENS)
        return start + _num_common(self.token_ids[block], token_ids[block])


@dataclass(slots=True, eq=False)
class _Entry:
    """A segment, and the tokens that its first columns hold.

    Attributes:
        is_running: whether the sequence that owns the segment is still running.
    """

    segment: Segment
    tokens: KeyedTokens
    is_running: bool


@dataclass(slots=True)
class PrefixCache:
    """Places sequences in the KV cache and reuses beginnings that are already in it.

    The segment of a sequence that has ended is kept, cut to what it holds, until rows are needed::

        segment of an earlier sequence   s s s s u u a a a
        a later prompt                   s s s s u u a a a t u u
                                         └ reused ───────┘ └ goes through the model

    A continued conversation grows in place if there is room after it, else its rows are copied.
    Entries whose sequence still runs can be copied from too: their columns never change.  Other
    entries move together if that makes room (:class:`RowRun`); if not, the least recently used
    loses its last rows.  Recomputing would give the same keys and values, so this changes speed,
    never tokens.

    Args:
        cache: nobody else may allocate its rows.
        is_enabled: ``False`` keeps and finds nothing.
    """

    cache: KVCache
    is_enabled: bool = True
    _entries: OrderedDict[_Entry, None] = field(default_factory=OrderedDict)
    """The one that was not used for longest is the first."""

    _by_start: dict[int, _Entry] = field(default_factory=dict)
    _by_key: dict[int, dict[_Entry, None]] = field(default_factory=dict)

    @property
    def usage(self) -> float:
        """The share of the cache's rows that belong to running sequences, 0 to 1."""
        num_rows = self.cache.num_rows
        return (num_rows - self._num_available_rows) / num_rows

    @property
    def _num_available_rows(self) -> int:
        """How many rows are free or can be freed, whether or not they are contiguous."""
        num_idle_rows = sum(entry.segment.num_rows for entry in self._idle())
        return self.cache.rows.num_free + num_idle_rows

    def keeps(self, num_tokens: int) -> bool:
        """Whether anything of a prompt of ``num_tokens`` tokens can be reused."""
        return self.is_enabled and num_tokens > BLOCK_TOKENS

    def num_to_await(self, prompt: KeyedTokens, other: KeyedTokens, min_tokens: int) -> int:
        """The length of the common beginning of ``prompt``, without its last token, and ``other``;
        0 if less than ``min_tokens`` more than can be reused already.  Takes about as long for long
        prompts as for short ones."""
        wanted = prompt.first(len(prompt.token_ids) - 1)
        num_common = wanted.num_common(other)
        num_found = max((number for number, _ in self._candidates(wanted)), default=0)
        return num_common if num_common >= num_found + min_tokens else 0

    def place(
        self, prompt: KeyedTokens, num_rows: int, *, is_shared: bool = True
    ) -> tuple[Segment, int] | None:
        """A segment of ``num_rows`` rows for a sequence.

        Args:
            is_shared: whether others may reuse what the sequence leaves; if not, what it reuses is
                copied and stays available to others, where there is room for both.

        Returns:
            The segment, and how many tokens of the prompt, never all, it already holds;
            ``None`` if there is no gap of that size now, and then nothing has changed.
        """
        if not self._has_room(num_rows):
            return None
        source, num_tokens = self._find(prompt.first(len(prompt.token_ids) - 1))
        segment = None
        if source is not None:
            segment = self._reuse(source, num_tokens, num_rows, may_take=is_shared)
        if segment is None:
            return self._allocate(num_rows), 0
        self.offer(segment, prompt.first(num_tokens))
        return segment, num_tokens

    def has_room_in_parts(self, num_rows: int) -> bool:
        """Whether this many rows are free or can be freed, whether or not they are contiguous."""
        return align(num_rows) <= self._num_available_rows

    def grow(self, segment: Segment, num_used: int, num_rows: int) -> Segment | None:
        """Grow a running sequence to ``num_rows`` rows, more than it has: in place if that moves no
        more rows of ended sequences than it uses itself, else by moving its first ``num_used``
        columns elsewhere.

        Returns:
            Its new segment; ``None`` if there is no gap of that size now, and then nothing has
            changed.
        """
        grown = self._extend(segment, num_rows, max_moved_rows=num_used)
        if grown is None and self._has_room(num_rows):
            grown = self._allocate(num_rows)
            self.cache.copy(segment.start, grown.start, num_used)
            self.cache.rows.free(segment)
        if grown is not None:
            self._move({segment.start: grown})
        return grown

    def compact(self, running: Sequence[Owned], num_rows: int = 0) -> list[Segment]:
        """Make all free rows contiguous, and let running sequences grow; entries of ended sequences
        are dropped, oldest first, until ``num_rows`` rows are free in addition.

        Args:
            running: the segments of all running sequences.

        Returns:
            Where each of them is now.
        """
        num_wanted = align(num_rows)
        num_wanted += sum(one.num_rows - one.segment.num_rows for one in running)
        while self.cache.rows.num_free < num_wanted and next(self._idle(), None) is not None:
            self._drop(num_wanted - self.cache.rows.num_free)
        idle = [
            Owned(entry.segment, len(entry.tokens.token_ids), entry.segment.num_rows)
            for entry in self._idle()
        ]
        owned = [*running, *idle]
        moved = self.cache.compact(owned)
        self._move({one.segment.start: now for one, now in zip(owned, moved, strict=True)})
        return moved[: len(running)]

    def _move(self, moved: Mapping[int, Segment]) -> None:
        """Update the entries of segments that moved, keyed by where they began."""
        found = [(self._by_start.pop(old, None), segment) for old, segment in moved.items()]
        for entry, segment in found:
            if entry is not None:
                entry.segment = segment
                self._by_start[segment.start] = entry

    def offer(self, segment: Segment, tokens: KeyedTokens) -> None:
        """Let others reuse the columns of a running sequence, which hold ``tokens``."""
        if self.is_enabled:
            self._add(segment, tokens, is_running=True)

    def clear(self) -> None:
        """Forget everything; the segments of running sequences stay theirs."""
        for entry in [*self._entries]:
            if entry.is_running:
                self._remove(entry)
            else:
                self._evict(entry)

    def reset(self) -> None:
        """Forget everything, the segments of running sequences too, in whatever state it is."""
        self._entries.clear()
        self._by_start.clear()
        self._by_key.clear()
        self.cache.rows.free_all()

    def release(self, segment: Segment, token_ids: Sequence[int], namespace: str | None) -> None:
        """Take back the segment of a sequence that has ended, whose columns hold ``token_ids``.

        Args:
            namespace: whose sequences may reuse them; ``None`` keeps nothing.
        """
        offered = self._by_start.get(segment.start)
        self._remove(offered)
        if not self.is_enabled or namespace is None or len(token_ids) < BLOCK_TOKENS:
            self.cache.rows.free(segment)
            return
        known = None if offered is None else offered.tokens
        tokens = KeyedTokens.of(token_ids, namespace, known)
        kept_before = self._kept(tokens)
        if kept_before is not None:
            self._entries.move_to_end(kept_before)
            self.cache.rows.free(segment)
            return
        kept = self.cache.rows.shorten(segment, len(token_ids))
        self._add(kept, tokens, is_running=False)
        if len(self._entries) > _MAX_ENTRIES:
            self._evict(next(self._idle()))

    def _reuse(
        self, source: _Entry, num_tokens: int, num_rows: int, *, may_take: bool
    ) -> Segment | None:
        """Rows whose first ``num_tokens`` hold the same as ``source``: its own, extended, if it may
        be taken over whole; else a copy; else its own rows, for which its neighbours are dropped.
        ``None`` if none of this is possible, and then nothing has changed."""
        takes = may_take and not source.is_running and num_tokens == len(source.tokens.token_ids)
        with _held(source):
            segment = self._extend(source.segment, num_rows, num_tokens) if takes else None
            if segment is not None:
                return segment
            segment = self._allocate(num_rows) if self._has_room(num_rows) else None
        if segment is None:
            return self._take_over(source, num_tokens, num_rows)
        self.cache.copy(source.segment.start, segment.start, num_tokens)
        if takes:
            self._evict(source)
        elif not may_take:
            self._entries.move_to_end(source)  # else what comes after it keeps the same beginning
        return segment

    def _take_over(self, source: _Entry, num_tokens: int, num_rows: int) -> Segment | None:
        """Cut ``source`` to ``num_tokens`` and extend it, dropping its neighbours."""
        run = self._run_of(source)
        if run.num_rows < align(num_rows):
            return None
        for segment in run.ended:
            if segment != source.segment:
                self._evict(self._by_start[segment.start])
        self._cut(source, num_tokens)
        run = self._run_of(source)
        self._push(run, to=run.start)
        with _held(source):
            return self._extend(source.segment, num_rows, max_moved_rows=0)

    def _extend(self, segment: Segment, num_rows: int, max_moved_rows: int) -> Segment | None:
        """Extend ``segment`` to ``num_rows`` by moving entries of ended sequences out of the way;
        ``None`` if that is impossible, and then nothing has changed."""
        num_more = align(num_rows) - segment.num_rows
        if not num_more:
            return segment
        part = self._part_from(segment.end, num_more, max_moved_rows)
        if part is None:
            return None
        self._push(part, to=part.end)
        more = self.cache.rows.allocate_at(segment.end, num_more)
        assert more is not None, "there was no room after the segment"
        return Segment(segment.start, segment.num_rows + num_more)

    def _part_from(self, start: int, num_rows: int, max_moved_rows: int) -> RowRun | None:
        """The shortest run from ``start`` on with ``num_rows`` free rows, if there is one of which
        no more rows move."""
        pieces, end = list[tuple[Segment, bool]](), start
        while num_rows > 0:
            piece, entry = self.cache.rows.gap_at(end), self._by_start.get(end)
            is_gap = piece is not None
            if piece is not None:
                num_rows -= piece.num_rows
            elif entry is not None and not entry.is_running:
                piece = entry.segment
                max_moved_rows -= piece.num_rows
            if piece is None or max_moved_rows < 0:
                return None
            pieces.append((piece, is_gap))
            end = piece.end
        return RowRun(pieces)

    def _allocate(self, num_rows: int) -> Segment:
        """Take rows; there must be enough once entries of ended sequences move or are dropped."""
        wanted = align(num_rows)
        while (segment := self.cache.rows.allocate(wanted)) is None:
            if self.cache.rows.num_free < wanted:
                self._drop(wanted)
                continue
            part = cheapest_part(self._runs(), wanted)
            if part is not None and part.num_ended_rows <= _MAX_MOVED * wanted:
                self._push(part, to=part.start)
                continue
            self._drop_some(wanted)
        return segment

    def _drop_some(self, num_rows: int) -> None:
        """Drop entries until the next look at where rows may move: one, or of many several, unless
        one of them leaves a gap that is large enough."""
        num_idle = sum(1 for _ in self._idle())
        for _ in range(1 + num_idle // _NUM_LOOKS):
            is_enough = next(self._idle()).segment.num_rows >= num_rows
            self._drop(num_rows)
            if is_enough:
                return

    def _has_room(self, num_rows: int) -> bool:
        """Whether ``num_rows`` contiguous rows would be free without entries of ended sequences."""
        wanted = align(num_rows)
        if not self.has_room_in_parts(num_rows):  # found sooner
            return False
        pieces = chain(self.cache.rows.gaps, (entry.segment for entry in self._idle()))
        if any(piece.num_rows >= wanted for piece in pieces):
            return True
        return any(run.num_rows >= wanted for run in self._runs())

    def _runs(self) -> list[RowRun]:
        return find_runs(self.cache.rows.gaps, (entry.segment for entry in self._idle()))

    def _run_of(self, entry: _Entry) -> RowRun:
        return next(run for run in self._runs() if entry.segment in run.ended)

    def _push(self, run: RowRun, to: int) -> None:
        """Move the entries of ended sequences to one end of ``run``."""
        ended = run.ended
        if len(ended) < len(run.pieces):
            moved = self.cache.push(ended, run.start, run.end, to)
            self._move({old.start: new for old, new in zip(ended, moved, strict=True)})

    def _drop(self, num_rows: int) -> None:
        """Free the last ``num_rows`` rows, or all, of the least recently used entry."""
        entry = next(self._idle())
        num_kept = entry.segment.num_rows - align(num_rows)
        if num_kept < BLOCK_TOKENS:
            self._evict(entry)
        else:
            self._cut(entry, num_kept)

    def _cut(self, entry: _Entry, num_tokens: int) -> None:
        """Keep the first tokens of an entry, and free the rows after them."""
        self._forget_keys(entry, num_tokens // BLOCK_TOKENS)
        entry.tokens = entry.tokens.first(num_tokens)
        entry.segment = self.cache.rows.shorten(entry.segment, num_tokens)

    def _find(self, wanted: KeyedTokens) -> tuple[_Entry | None, int]:
        """The entry with the longest match of ``wanted``, and its length."""
        best, num_best = None, BLOCK_TOKENS - 1
        for most, entry in self._candidates(wanted):
            if most <= num_best:
                break
            num_common = _num_common(entry.tokens.token_ids, wanted.token_ids)
            if num_common > num_best:
                best, num_best = entry, num_common
        return best, num_best if best is not None else 0

    def _candidates(self, wanted: KeyedTokens) -> list[tuple[int, _Entry]]:
        """Entries that may match ``wanted``, each with the most tokens it can match: those that do
        if equal keys mean equal tokens.  The longest match first."""
        num_blocks = bisect_left(wanted.keys, True, key=lambda key: key not in self._by_key)
        if not num_blocks:
            return []
        known = islice(reversed(self._by_key[wanted.keys[num_blocks - 1]]), _NUM_COMPARED)
        found = [
            (wanted.num_common_after(num_blocks, entry.tokens.token_ids), entry)
            for entry in known
            if entry.tokens.namespace == wanted.namespace
        ]
        return sorted(found, key=itemgetter(0), reverse=True)

    def _kept(self, tokens: KeyedTokens) -> _Entry | None:
        """The entry of an ended sequence that holds all of ``tokens``."""
        source, num_tokens = self._find(tokens)
        is_kept = source is not None and not source.is_running
        return source if is_kept and num_tokens == len(tokens.token_ids) else None

    def _add(self, segment: Segment, tokens: KeyedTokens, *, is_running: bool) -> None:
        self._remove(self._by_start.get(segment.start))
        entry = _Entry(segment, tokens, is_running)
        self._entries[entry] = None
        self._by_start[segment.start] = entry
        for key in tokens.keys:
            self._by_key.setdefault(key, {})[entry] = None

    def _evict(self, entry: _Entry) -> None:
        """Free the rows of an entry."""
        assert not entry.is_running, "a running sequence would lose its rows"
        self._remove(entry)
        self.cache.rows.free(entry.segment)

    def _remove(self, entry: _Entry | None) -> None:
        if entry is not None:
            del self._entries[entry], self._by_start[entry.segment.start]
            self._forget_keys(entry, 0)

    def _forget_keys(self, entry: _Entry, num_kept: int) -> None:
        """Make an entry be found by its first ``num_kept`` keys only."""
        for key in entry.tokens.keys[num_kept:]:
            del self._by_key[key][entry]
            if not self._by_key[key]:
                del self._by_key[key]

    def _idle(self) -> Iterator[_Entry]:
        """The entries that can be dropped, oldest first."""
        return (entry for entry in self._entries if not entry.is_running)


@contextmanager
def _held(entry: _Entry) -> Iterator[None]:
    """Keep its rows in place, as for a running sequence."""
    was_running, entry.is_running = entry.is_running, True
    try:
        yield
    finally:
        entry.is_running = was_running


def _keys(token_ids: np.ndarray, namespace: str, known: Sequence[int]) -> Iterator[int]:
    """A key for each whole block after those whose keys are ``known``, of all tokens up to its end;
    keys of different texts may collide, so tokens and namespaces are compared as well."""
    key = known[-1] if known else hash(namespace)
    first = len(known) * BLOCK_TOKENS
    for start in range(first, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, token_ids[start : start + BLOCK_TOKENS].tobytes()))
        yield key


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
