"""The model database's tables of one namespace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdserve.databases.answer_places import AnswerPlaces
from hdserve.databases.history import (
    LOG_END,
    LOG_OLDEST,
    MATCH_TOKENS,
    PLACES_PER_TOKEN,
    append_tokens,
    index_tokens,
    new_places,
)
from hdserve.databases.ngram import BUCKET_BYTES, START, Ints, Rows, Tokens, insert_parts
from hdserve.databases.ngram_table import MIN_BUCKETS, NgramTable

MODEL_ORDERS = (0, 1, 2, 4)
"""Context lengths in tokens, ascending."""

MIN_RESERVE_BYTES = MIN_BUCKETS * BUCKET_BYTES
"""Most namespaces stay small, and small reserves are resident in full."""

OBJECT_BYTES = 3 << 10
"""What the objects of a namespace take in addition to their arrays."""

LOG_SHARE = 6
"""One part in this many of the bytes of a partition holds its log and the index of the log."""

KEPT_LOG_SHARE = 4
"""A log is only shrunk when it takes more than one part in this many of the bytes: the limit of a
full partition changes with every text of other namespaces, and not every change should move the
log."""

ANSWER_SHARE = 128
"""One part in this many of the bytes of a partition holds where answers begin."""

LOG_BYTES_PER_TOKEN = 4 + 8 * PLACES_PER_TOKEN
MIN_LOG_TOKENS = 256


class NamespaceTables:
    """The tables of one namespace.

    Args:
        number: a different one for each that is created, from 1 on.

    Attributes:
        max_bytes: its current limit, see :meth:`limit`.
        table: the n-grams.
        log, places, log_state: the text itself, for copies of any length, see ``history``.
        answers: where in the log the answers to prompts begin.
    """

    def __init__(self, max_bytes: int, number: int = 1) -> None:
        self.max_bytes = max_bytes
        self.number = number
        self._max_log_tokens = _log_tokens(max_bytes)
        self.answers = AnswerPlaces(max_bytes // ANSWER_SHARE)
        self.table = NgramTable(self._table_bytes, MIN_RESERVE_BYTES)
        self.log: Tokens = np.zeros(MIN_LOG_TOKENS, np.int32)
        self.places: Ints = new_places(MIN_LOG_TOKENS)
        self.log_state: Ints = np.array([0, 1], np.int64)
        self.num_tokens = 0
        self.num_texts = 0
        self._orders = np.array([*MODEL_ORDERS, -1], np.int64)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        log_bytes = len(self.log) * LOG_BYTES_PER_TOKEN
        return OBJECT_BYTES + self.table.num_bytes + log_bytes + self.answers.num_bytes

    @property
    def arrays(self) -> tuple[Rows, Ints, Tokens, Ints, Ints]:
        """What is drafted from: rows and size of the table, log, places and state of the log.  Each
        may be replaced by another array when something is inserted, or the limit changes."""
        return self.table.rows, self.table.size, self.log, self.places, self.log_state

    @property
    def log_end(self) -> int:
        """The position after the last token of the log."""
        return int(self.log_state[LOG_END])

    def limit(self, max_bytes: int) -> int:
        """Take no more than ``max_bytes`` from now on, at most the limit it was created with; the
        least valuable contexts and the oldest text are forgotten.

        Returns:
            How many contexts were given up.
        """
        self.max_bytes = max_bytes
        self._max_log_tokens = _log_tokens(max_bytes)
        if len(self.log) * LOG_BYTES_PER_TOKEN * KEPT_LOG_SHARE <= max_bytes:
            self._max_log_tokens = max(self._max_log_tokens, len(self.log))
        if len(self.log) > self._max_log_tokens:
            self._resize_log(self._max_log_tokens)
        self.answers.limit(max_bytes // ANSWER_SHARE)
        return self.table.limit(self._table_bytes)

    @property
    def _table_bytes(self) -> int:
        """What is left for the table when the log is as large as it may become."""
        log_bytes = self._max_log_tokens * LOG_BYTES_PER_TOKEN
        return self.max_bytes - OBJECT_BYTES - log_bytes - self.max_bytes // ANSWER_SHARE

    def answer_place(self, prompt: int, output: Sequence[int]) -> int:
        """Where in the log the last answer to a prompt of this hash goes on after ``output``; 0 if
        it is not in the log, began otherwise or is over."""
        begin = self.answers.place_of(prompt)
        end = begin + len(output)
        if begin <= self.log_state[LOG_OLDEST] or end >= self.log_end:
            return 0
        *said, coming = self.log[np.arange(begin, end + 1) & (len(self.log) - 1)].tolist()
        return end if said == [*output] and coming != START else 0

    def texts_since(self, position: int) -> list[list[int]]:
        """The texts in the log from ``position`` on, as far as they are still there."""
        begin = max(position, int(self.log_state[LOG_OLDEST]) + 1, 1)
        positions = np.arange(begin, self.log_end) & (len(self.log) - 1)
        tokens = self.log[positions]
        starts = np.flatnonzero(tokens == START)
        return [part[part != START].tolist() for part in np.split(tokens, starts)]

    def insert(self, tokens: Tokens, num_counted: int = 0, prompt: int | None = None) -> None:
        """Count a text that begins with ``START`` and append it to the log.

        Args:
            num_counted: tokens after ``START`` that were already given to :meth:`count`.
            prompt: the hash of the prompt that the text answers.
        """
        self.count(tokens, [(len(tokens), 1 + num_counted)])
        begin, is_whole = self.log_end, self._append(tokens)
        if prompt is not None and is_whole:
            self.answers.note(prompt, begin + 1)
        self.num_texts += 1

    def count(self, tokens: Tokens, parts: Sequence[tuple[int, int]]) -> None:
        """Count the new tokens of several texts.

        Args:
            tokens: of all texts, one after the other.
            parts: of each text the number of tokens, and how many, from the first, are old.
        """
        num_new = sum(max(0, length - begin) for length, begin in parts)
        num_contexts = num_new * (len(MODEL_ORDERS) - 1)  # the empty context exists only once
        while self.table.is_reserve_low(num_contexts):
            self.table.reserve_more(num_contexts)
        rows, size, stamp = self.table.rows, self.table.size, self.table.stamp
        insert_parts(rows, size, tokens, np.array(parts, np.int64), self._orders, stamp)
        self.table.advance_stamp()
        self.num_tokens += num_new

    def _append(self, tokens: Tokens) -> bool:
        """Append a text to the log, or its end as a text of half the log's size; returns whether it
        is whole."""
        is_whole = len(tokens) <= self._max_log_tokens // 2
        if not is_whole:
            tokens = tokens[-(self._max_log_tokens // 2) :].copy()
            tokens[0] = START
        in_use = self.log_end - int(self.log_state[LOG_OLDEST])
        num_needed = in_use + len(tokens)
        while len(self.log) < min(self._max_log_tokens, num_needed):
            self._resize_log(min(self._max_log_tokens, len(self.log) * 4))
        append_tokens(self.log, self.places, self.log_state, tokens)
        return is_whole

    def _resize_log(self, capacity: int) -> None:
        """Keep the last ``capacity`` tokens, a power of two; positions do not change."""
        self._forget_before(self.log_end - capacity)
        begin, end = int(self.log_state[LOG_OLDEST]), self.log_end
        positions = np.arange(begin, end)
        log, places = np.zeros(capacity, np.int32), new_places(capacity)
        log[positions & (capacity - 1)] = self.log[positions & (len(self.log) - 1)]
        index_tokens(log, places, begin + MATCH_TOKENS, end)
        self.log, self.places = log, places

    def _forget_before(self, position: int) -> None:
        self.log_state[LOG_OLDEST] = max(int(self.log_state[LOG_OLDEST]), position)


def _log_tokens(max_bytes: int) -> int:
    """Most tokens in the log of a partition, a power of two."""
    num_tokens = max(MIN_LOG_TOKENS, max_bytes // LOG_SHARE // LOG_BYTES_PER_TOKEN)
    return 1 << (num_tokens.bit_length() - 1)
