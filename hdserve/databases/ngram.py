"""The n-gram context table: which tokens followed a context, how often and how recently.

A row is one cache line of 16 ``uint32`` words and holds one context::

    word   0         1         2                    3 .. 15
           hash      hash      stamp 16 | total 16  13 slots: count 12 | token 20
           low, odd  high                           by count, most recent first among equals

Word 0 of an empty row is 0.  A context is in one *bucket* of ``BUCKET_ROWS`` rows, which are filled
from the front.  When a bucket is full, a new context replaces its least valuable row, so memory is
bounded, no search is long, and a collision costs a wrong guess, never a wrong token.

The table grows without a pause by linear hashing (Litwin 1980): with ``n`` buckets in use, the
bucket of a hash is given by its low bits, one bit fewer if that is beyond ``n``; adding bucket
``n`` splits the rows of one other bucket::

    n = 6     bucket  0   1   2   3   4   5        0 and 1 were split into 0, 4 and 1, 5;
                      └───┼───────────┘   │        2 is next: its rows with bit 2 set go to 6
                          └───────────────┘

The slots of a row are a frequency sketch in the manner of Misra and Gries (1982): a token that
finds no slot decrements the last one.  Rows keep the full hash, so that tables can be merged
without the text they were made from.

Context hashes run from the newest token to the oldest, so that the hash of ``n + 1`` tokens
extends that of ``n`` by one multiplication.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdserve.databases.cache_lines import LINE_BYTES, LINE_WORDS, new_lines, prefetch_line
from hdserve.databases.compiled import fast_inlined, jit

Rows = npt.NDArray[np.uint32]
Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

ROW_WORDS, ROW_BYTES = LINE_WORDS, LINE_BYTES
BUCKET_ROWS = 8
BUCKET_BYTES = BUCKET_ROWS * ROW_BYTES
FIRST_SLOT = 3
NUM_SLOTS = ROW_WORDS - FIRST_SLOT
PREFETCHED_ROWS = 2
"""How many rows of a bucket are prefetched."""

PREFETCH_DISTANCE = 4
"""How many tokens ahead the rows of contexts are prefetched while a text is inserted."""

ROWS_PER_BUCKET = 4
"""Contexts added per bucket before another bucket is added; one not yet split holds more."""

MAX_TOKEN_ID = (1 << 20) - 1
MAX_COUNT = (1 << 12) - 1
MAX_TOTAL = 65000
MAX_STAMP = (1 << 16) - 1
AGE_SHIFT = 5
"""The value of a row halves every ``2 ** AGE_SHIFT`` stamps without an update."""

START = -1
"""Comes before the first token of every text: contexts do not reach beyond it."""

NUM_BUCKETS, NUM_ADDED = 0, 1
"""Entries of the ``size`` array of a table."""

HASH_SEED = np.uint64(0x9E3779B97F4A7C15)
_HASH_ADD = np.uint64(0xD1B54A32D192ED03)
_HASH_MULTIPLY = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT_32 = np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)

COUNT_SHIFT = np.uint32(20)
"""The word of a slot is a token, and its count from this bit on."""

TOKEN_MASK = np.uint32(MAX_TOKEN_ID)
"""The bits of a slot's word that hold its token."""

TOTAL_MASK = np.uint32(0xFFFF)
"""The bits of a row's third word that hold its total."""

_COUNT_ONE = np.uint32(1 << 20)
_STAMP_SHIFT = np.uint32(16)
_ODD = np.uint32(1)
_ZERO = np.uint32(0)


def new_rows(num_buckets: int) -> Rows:
    """Zeroed rows for ``num_buckets`` buckets: ``[8 * num_buckets, 16]``."""
    return new_lines(num_buckets * BUCKET_ROWS)


def new_size(num_buckets: int) -> Ints:
    """The ``size`` array of an empty table that uses ``num_buckets`` buckets."""
    return np.array([num_buckets, 0], np.int64)


@fast_inlined
def extend_hash(context_hash: np.uint64, token: int) -> np.uint64:
    """The hash of a context with one older ``token`` in front."""
    value = (context_hash ^ (np.uint64(token) + _HASH_ADD)) * _HASH_MULTIPLY
    return value ^ (value >> _SHIFT_32)


@fast_inlined
def linear_bucket(bits: int, num_buckets: int) -> int:
    """The bucket of a hash under linear hashing; ``num_buckets < 2 ** 32``."""
    mask = num_buckets - 1
    mask |= mask >> 1
    mask |= mask >> 2
    mask |= mask >> 4
    mask |= mask >> 8
    mask |= mask >> 16
    bucket = bits & mask
    return bucket & (mask >> 1) if bucket >= num_buckets else bucket


@fast_inlined
def highest_bit(value: int) -> int:
    """The largest power of two that is not above ``value``."""
    highest = 1
    while highest * 2 <= value:
        highest *= 2
    return highest


@fast_inlined
def total_of(rows: Rows, row: int) -> int:
    """How often a context was counted."""
    return np.int64(rows[row, 2] & TOTAL_MASK)


@fast_inlined
def stamp_of(rows: Rows, row: int) -> int:
    """The age mark of a row."""
    return np.int64(rows[row, 2] >> _STAMP_SHIFT)


@fast_inlined
def prefetch_row(rows: Rows, num_buckets: int, context_hash: np.uint64) -> None:
    """Prefetch what :func:`find_row` will most likely read."""
    bucket = linear_bucket(np.int64(context_hash >> _SHIFT_32), num_buckets)
    for row in range(PREFETCHED_ROWS):
        prefetch_line(rows, bucket * BUCKET_ROWS + row)


@fast_inlined
def find_row(rows: Rows, num_buckets: int, context_hash: np.uint64, min_stamp: int) -> int:
    """The index of the context's row, or -1; rows stamped before ``min_stamp`` are empty."""
    low = np.uint32(context_hash & _LOW_32) | _ODD
    high = np.uint32(context_hash >> _SHIFT_32)
    start = linear_bucket(np.int64(high), num_buckets) * BUCKET_ROWS
    for row in range(start, start + BUCKET_ROWS):
        word = rows[row, 0]
        if word == _ZERO or stamp_of(rows, row) < min_stamp:
            return -1
        if word == low and rows[row, 1] == high:
            return row
    return -1


@fast_inlined
def row_value(rows: Rows, row: int, stamp: int) -> int:
    """The value of a row when new rows are stamped ``stamp``: its total, halved as it ages."""
    row_stamp = stamp_of(rows, row)
    age = max(0, stamp - row_stamp)
    total = total_of(rows, row)
    return (((total << 16) >> min(age >> AGE_SHIFT, 40)) << 16) + row_stamp


@fast_inlined
def least_valuable(rows: Rows, start: int, stamp: int) -> int:
    """The row to give up in the full bucket that begins at ``start``."""
    victim = start
    lowest = np.int64(1 << 62)
    for row in range(start, start + BUCKET_ROWS):
        value = row_value(rows, row, stamp)
        if value < lowest:
            lowest = value
            victim = row
    return victim


@fast_inlined
def claim_row(rows: Rows, size: Ints, context_hash: np.uint64, stamp: int, min_stamp: int) -> int:
    """The row of a context: its own, else a cleared one that gets its hash."""
    low = np.uint32(context_hash & _LOW_32) | _ODD
    high = np.uint32(context_hash >> _SHIFT_32)
    start = linear_bucket(np.int64(high), size[NUM_BUCKETS]) * BUCKET_ROWS
    victim = -1
    for row in range(start, start + BUCKET_ROWS):
        word = rows[row, 0]
        if word == _ZERO or stamp_of(rows, row) < min_stamp:
            victim = row
            break
        if word == low and rows[row, 1] == high:
            return row
    if victim < 0:
        victim = least_valuable(rows, start, stamp)
    size[NUM_ADDED] += 1
    for word_index in range(ROW_WORDS):
        rows[victim, word_index] = _ZERO
    rows[victim, 0] = low
    rows[victim, 1] = high
    return victim


@fast_inlined
def set_total(rows: Rows, row: int, total: int, stamp: int) -> None:
    """Write a row's total and age mark."""
    rows[row, 2] = np.uint32(total) | (np.uint32(stamp) << _STAMP_SHIFT)


@fast_inlined
def slot_of(rows: Rows, row: int, token_word: np.uint32) -> int:
    """The slot that holds a token, else the first free one, else -1."""
    for slot in range(FIRST_SLOT, ROW_WORDS):
        word = rows[row, slot]
        if word == _ZERO or (word & TOKEN_MASK) == token_word:
            return slot
    return -1


@fast_inlined
def halve(rows: Rows, row: int, times: int) -> int:
    """Halve all counts of a row ``times`` times, so that recent tokens weigh more; returns the new
    total."""
    kept = FIRST_SLOT
    for slot in range(FIRST_SLOT, ROW_WORDS):
        word = rows[row, slot]
        count = (word >> COUNT_SHIFT) >> np.uint32(times)
        rows[row, slot] = _ZERO
        if count > _ZERO:
            rows[row, kept] = count * _COUNT_ONE | (word & TOKEN_MASK)
            kept += 1
    return total_of(rows, row) >> times


@fast_inlined
def count_token(rows: Rows, row: int, token: int, count: int, stamp: int) -> None:
    """Count ``token`` ``count`` times in the row of its context: at most ``MAX_COUNT // 2`` times,
    or as often as fits with the counts already there."""
    total = total_of(rows, row)
    if total + count > MAX_TOTAL:
        total = halve(rows, row, 1)
    token_word = np.uint32(token)
    slot = slot_of(rows, row, token_word)
    if slot < 0:
        slot = ROW_WORDS - 1
        held = np.int64(rows[row, slot] >> COUNT_SHIFT)
        if held > count:
            rows[row, slot] -= np.uint32(count) * _COUNT_ONE
            set_total(rows, row, total + count, stamp)
            return
        rows[row, slot] = token_word
    new_count = np.int64(rows[row, slot] >> COUNT_SHIFT) + count
    if new_count > MAX_COUNT:
        total = halve(rows, row, 1)
        slot = slot_of(rows, row, token_word)
        new_count = np.int64(rows[row, slot] >> COUNT_SHIFT) + count
    while slot > FIRST_SLOT and np.int64(rows[row, slot - 1] >> COUNT_SHIFT) <= new_count:
        rows[row, slot] = rows[row, slot - 1]
        slot -= 1
    rows[row, slot] = np.uint32(new_count) * _COUNT_ONE | token_word
    set_total(rows, row, total + count, stamp)


@fast_inlined
def _copy_within(rows: Rows, source: int, target: int) -> None:
    for word in range(ROW_WORDS):
        rows[target, word] = rows[source, word]


@fast_inlined
def add_bucket(rows: Rows, size: Ints, min_stamp: int) -> None:
    """Bring one more bucket into use and move the rows to it that belong there."""
    added = size[NUM_BUCKETS]
    highest = highest_bit(added)
    size[NUM_BUCKETS] = added + 1
    source = (added - highest) * BUCKET_ROWS
    target = added * BUCKET_ROWS
    for row in range(target, target + BUCKET_ROWS):
        rows[row, 0] = _ZERO
    kept = source
    for row in range(source, source + BUCKET_ROWS):
        if rows[row, 0] == _ZERO or stamp_of(rows, row) < min_stamp:
            break
        is_moved = np.int64(rows[row, 1]) & highest != 0
        place = target if is_moved else kept
        if place != row:
            _copy_within(rows, row, place)
            rows[row, 0] = _ZERO
        if is_moved:
            target += 1
        else:
            kept += 1


@fast_inlined
def remove_bucket(rows: Rows, size: Ints, stamp: int) -> int:
    """Take the last bucket out of use: its rows return to the bucket they were split from, if they
    are worth more than the rows there; returns how many rows were given up."""
    removed = size[NUM_BUCKETS] - 1
    size[NUM_BUCKETS] = removed
    source = removed * BUCKET_ROWS
    target = (removed - highest_bit(removed)) * BUCKET_ROWS
    free, end = target, target + BUCKET_ROWS
    while free < end and rows[free, 0] != _ZERO:
        free += 1
    num_given_up = 0
    for row in range(source, source + BUCKET_ROWS):
        if rows[row, 0] == _ZERO:
            break
        if free < end:
            _copy_within(rows, row, free)
            free += 1
            continue
        num_given_up += 1
        victim = least_valuable(rows, target, stamp)
        if row_value(rows, row, stamp) > row_value(rows, victim, stamp):
            _copy_within(rows, row, victim)
    return num_given_up


@jit
def remove_buckets(rows: Rows, size: Ints, num_buckets: int, stamp: int) -> int:
    """Take buckets out of use until ``num_buckets`` are left, at least one; rows of any age count.
    Returns how many rows were given up."""
    num_given_up = 0
    while size[NUM_BUCKETS] > max(1, num_buckets):
        num_given_up += remove_bucket(rows, size, stamp)
    return num_given_up


@fast_inlined
def grow(rows: Rows, size: Ints, min_stamp: int) -> None:
    """Add buckets until the table is not crowded, as far as there are ``rows``."""
    while (
        size[NUM_ADDED] > size[NUM_BUCKETS] * ROWS_PER_BUCKET
        and (size[NUM_BUCKETS] + 1) * BUCKET_ROWS <= rows.shape[0]
    ):
        add_bucket(rows, size, min_stamp)


@fast_inlined
def put(
    rows: Rows, size: Ints, context_hash: np.uint64, token: int, stamp: int, min_stamp: int
) -> None:
    """Count ``token`` once after a context."""
    row = claim_row(rows, size, context_hash, stamp, min_stamp)
    count_token(rows, row, token, 1, stamp)


@fast_inlined
def prefetch_contexts(
    rows: Rows, num_buckets: int, tokens: Tokens, position: int, orders: Ints
) -> None:
    """Prefetch the rows of the contexts before a position."""
    context_hash = HASH_SEED
    length = 0
    for order in orders:
        if order < 0 or order > position:
            break
        while length < order:
            length += 1
            context_hash = extend_hash(context_hash, np.int64(tokens[position - length]))
        prefetch_row(rows, num_buckets, context_hash)


@jit
def insert_tokens(
    rows: Rows,
    size: Ints,
    tokens: Tokens,
    begin: int,
    end: int,
    orders: Ints,
    stamp: int,
    min_stamp: int,
) -> None:
    """Count the tokens ``[begin, end)`` of a text, each after its contexts of the given orders.

    Args:
        tokens: int32, the text from its first token on (with ``START`` first if it should count).
        orders: context lengths in tokens, ascending, then -1; 0 counts without a context.
        stamp: the age mark of the rows touched.
        min_stamp: rows stamped before it are empty.
    """
    for position in range(begin, end):
        if position + PREFETCH_DISTANCE < end:
            ahead = position + PREFETCH_DISTANCE
            prefetch_contexts(rows, size[NUM_BUCKETS], tokens, ahead, orders)
        token = np.int64(tokens[position])
        context_hash = HASH_SEED
        length = 0
        for order in orders:
            if order < 0 or order > position:
                break
            while length < order:
                length += 1
                context_hash = extend_hash(context_hash, np.int64(tokens[position - length]))
            put(rows, size, context_hash, token, stamp, min_stamp)
        grow(rows, size, min_stamp)


@jit
def insert_parts(
    rows: Rows,
    size: Ints,
    tokens: Tokens,
    parts: Ints,
    orders: Ints,
    stamp: int,
) -> None:
    """Count the new tokens of several texts, as :func:`insert_tokens` does.

    Args:
        tokens: of all texts, one after the other.
        parts: ``[num_texts, 2]``: how many tokens a text has, and how many of them, the first ones,
            are old.
    """
    first = 0
    for part in range(len(parts)):
        length, begin = parts[part, 0], parts[part, 1]
        text = tokens[first : first + length]
        insert_tokens(rows, size, text, begin, length, orders, stamp, 0)
        first += length


@jit
def num_valid(tokens: Tokens) -> int:
    """How many tokens after the first come before the first id that cannot be a token."""
    position = 1
    while position < tokens.shape[0] and 0 <= tokens[position] <= MAX_TOKEN_ID:
        position += 1
    return position - 1


@jit
def rebase_stamps(rows: Rows, num_buckets: int, change: int) -> None:
    """Lower all age marks by ``change``, to 0 at least."""
    for row in range(num_buckets * BUCKET_ROWS):
        stamp = stamp_of(rows, row)
        set_total(rows, row, total_of(rows, row), max(0, stamp - change))


@jit
def copy_stamped(source: Rows, target: Rows, num_rows: int, old_stamp: int, stamp: int) -> None:
    """Copy the first rows of a table, those that carry ``old_stamp``, with another age mark."""
    for row in range(num_rows):
        if stamp_of(source, row) != old_stamp:
            target[row, 0] = _ZERO
            continue
        for word in range(ROW_WORDS):
            target[row, word] = source[row, word]
        set_total(target, row, total_of(source, row), stamp)


@jit
def copy_row(rows: Rows, size: Ints, suffix: Tokens, row: Rows) -> bool:
    """Copy the row of a context, given newest token first, to ``row[0]``; whether it exists."""
    context_hash = HASH_SEED
    for token in suffix:
        context_hash = extend_hash(context_hash, np.int64(token))
    index = find_row(rows, size[NUM_BUCKETS], context_hash, 0)
    if index < 0:
        return False
    for word in range(ROW_WORDS):
        row[0, word] = rows[index, word]
    return True


def most_frequent(rows: Rows, size: Ints, context: list[int], k: int) -> list[tuple[int, int]]:
    """The ``k`` likeliest tokens after ``context`` (oldest first) with their counts.

    Empty when the table does not hold the context.
    """
    row = np.zeros((1, ROW_WORDS), np.uint32)
    if not copy_row(rows, size, np.array(context[::-1], np.int32), row):
        return []
    words = [int(word) for word in row[0, FIRST_SLOT:] if word]
    return [(word & MAX_TOKEN_ID, word >> int(COUNT_SHIFT)) for word in words[:k]]
