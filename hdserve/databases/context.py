"""The context database: the text of one running request.

Tables come from a pool and return to it, so that neither starting nor ending a request causes a
pause: a table is emptied by giving its next user a higher age mark, below which rows count as
empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hdserve.databases.history import MATCH_TOKENS, index_tokens, new_places
from hdserve.databases.last_positions import new_last_positions, note_positions
from hdserve.databases.ngram import (
    BUCKET_BYTES,
    BUCKET_ROWS,
    MAX_STAMP,
    NUM_ADDED,
    NUM_BUCKETS,
    ROWS_PER_BUCKET,
    Ints,
    Rows,
    Tokens,
    copy_stamped,
    insert_tokens,
    new_rows,
    new_size,
)

MAX_TABLE_BYTES = 8 << 20
"""Largest table of one request: 30,000 to 50,000 tokens.  Of a longer text the rarest contexts are
forgotten; repetitions of five tokens are found in all of it."""

ROWS_PER_TOKEN = 4
"""About how many contexts a token of text adds."""

EAGER_TOKENS = 32768
"""The most tokens of a prompt that are inserted at once, in 3 to 5 ms.  The rest follows in pieces,
newest first, because drafts need the end of a text most (docs/adr/0011)."""

PIECE_TOKENS = 8192
"""The tokens of such a piece, which takes a millisecond or two.  With smaller pieces a short answer
would end before its whole prompt is inserted."""


@dataclass(slots=True)
class PooledRows:
    """Rows that are reused: those stamped before ``stamp`` count as empty."""

    rows: Rows
    stamp: int = 0


class ContextPool:
    """Keeps the tables of ended requests for the next ones.

    Args:
        max_bytes: most memory of tables that are not in use.

    Attributes:
        num_bytes: memory of the tables that are kept.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._free: dict[int, list[PooledRows]] = {}

    def take(self, num_buckets: int) -> PooledRows:
        """A table of at least ``num_buckets`` buckets with a fresh stamp."""
        reserved = 1 << (num_buckets - 1).bit_length()
        free = self._free.get(reserved)
        if free:
            pooled = free.pop()
            self.num_bytes -= reserved * BUCKET_BYTES
        else:
            pooled = PooledRows(new_rows(reserved))
        if pooled.stamp == MAX_STAMP:
            pooled.rows[:] = 0
            pooled.stamp = 0
        pooled.stamp += 1
        return pooled

    def give_back(self, pooled: PooledRows) -> None:
        """Keep a table for later, if there is room."""
        reserved = len(pooled.rows) // BUCKET_ROWS
        num_bytes = reserved * BUCKET_BYTES
        if self.num_bytes + num_bytes <= self.max_bytes:
            self.num_bytes += num_bytes
            self._free.setdefault(reserved, []).append(pooled)


class ContextDatabase:
    """The n-grams and the copy index of one request's text.

    Args:
        pool: where the table comes from.
        token_ids: the text so far: the expected answer, the prompt, and the answer so far.
        orders: ``int64[n]`` context lengths, ascending, -1 at the end.
        num_expected_tokens: the most tokens prompt and output will have together.

    Attributes:
        tokens: int32 buffer; its length is a power of two.
        places: the copy index over ``tokens``.
        last_positions: the last position of each token.
        table, size: the n-gram rows and their use.
    """

    def __init__(
        self, pool: ContextPool, token_ids: list[int], orders: Ints, num_expected_tokens: int
    ) -> None:
        num_prompt = len(token_ids)
        capacity = 1 << max(6, (max(num_prompt, num_expected_tokens) - 1).bit_length())
        self._pool = pool
        self._orders = orders
        self.tokens: Tokens = np.zeros(capacity, np.int32)
        self.places: Ints = new_places(capacity)
        self.last_positions: Tokens = new_last_positions(capacity)
        self.tokens[:num_prompt] = token_ids
        note_positions(self.last_positions, self.tokens, num_prompt)
        self.num_tokens = num_prompt
        buckets = max(64, (num_prompt + 256) * ROWS_PER_TOKEN // 3)
        self.table = pool.take(min(buckets, MAX_TABLE_BYTES // BUCKET_BYTES))
        self.size = new_size(min(buckets, len(self.table.rows) // BUCKET_ROWS))
        self._num_pending = num_prompt
        """Tokens at the front of the prompt that are not inserted yet."""
        self._insert_piece(EAGER_TOKENS)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        arrays = (self.tokens, self.places, self.last_positions)
        return int(self.size[NUM_BUCKETS]) * BUCKET_BYTES + sum(array.nbytes for array in arrays)

    @property
    def num_entries(self) -> int:
        """Contexts held, counted when added; at most what the table has room for."""
        return min(int(self.size[NUM_ADDED]), len(self.table.rows))

    @property
    def is_table_full(self) -> bool:
        """Whether the table has used up its rows and may be enlarged."""
        reserved = len(self.table.rows) // BUCKET_ROWS
        return (
            int(self.size[NUM_BUCKETS]) == reserved
            and int(self.size[NUM_ADDED]) > reserved * ROWS_PER_BUCKET
            and reserved * BUCKET_BYTES < MAX_TABLE_BYTES
        )

    def has_room(self, num_new: int) -> bool:
        """Whether ``num_new`` more tokens fit into the buffer."""
        return self.num_tokens + num_new <= len(self.tokens)

    def _insert_piece(self, num_tokens: int) -> None:
        """Insert the last ``num_tokens`` tokens of the part of the prompt that is still missing."""
        end = self._num_pending
        begin = max(0, end - num_tokens)
        stamp = self.table.stamp
        insert_tokens(
            self.table.rows, self.size, self.tokens, begin, end, self._orders, stamp, stamp
        )
        first, last = max(begin, MATCH_TOKENS - 1), min(end, self.num_tokens - 1)
        index_tokens(self.tokens, self.places, first, last)
        self._num_pending = begin

    def continue_prompt(self) -> None:
        """Insert one more piece of a prompt that was too long to be inserted at once."""
        self._insert_piece(PIECE_TOKENS)

    @property
    def is_complete(self) -> bool:
        """Whether the whole prompt is inserted."""
        return self._num_pending == 0

    def enlarge(self, num_new: int) -> None:
        """Make room for more tokens and more contexts.  If memory is short nothing is replaced, as
        compiled code writes as far as :meth:`has_room` says."""
        text = self.tokens, self.places, self.last_positions
        if not self.has_room(num_new):
            text = self._larger_text(num_new)
        if self.is_table_full:
            self.enlarge_table()
        self.tokens, self.places, self.last_positions = text

    def _larger_text(self, num_new: int) -> tuple[Tokens, Ints, Tokens]:
        """Larger copies of ``tokens``, ``places`` and ``last_positions``."""
        capacity = 1 << (self.num_tokens + num_new - 1).bit_length()
        tokens: Tokens = np.zeros(capacity, np.int32)
        tokens[: len(self.tokens)] = self.tokens
        places = new_places(capacity)
        index_tokens(tokens, places, max(self._num_pending, MATCH_TOKENS - 1), self.num_tokens - 1)
        last_positions = new_last_positions(capacity)
        note_positions(last_positions, tokens, self.num_tokens)
        return tokens, places, last_positions

    def enlarge_table(self) -> None:
        """Move the contexts to a table of twice the size."""
        old = self.table
        in_use = int(self.size[NUM_BUCKETS]) * BUCKET_ROWS
        self.table = self._pool.take(int(self.size[NUM_BUCKETS]) * 2)
        copy_stamped(old.rows, self.table.rows, in_use, old.stamp, self.table.stamp)
        self._pool.give_back(old)

    def release(self) -> None:
        """Return the table to the pool; the database must not be used again."""
        self._pool.give_back(self.table)
