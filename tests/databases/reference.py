"""Plain Python models of the compiled databases, for comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

from hdserve.databases import ngram

_MASK = (1 << 64) - 1


def context_hash(context: list[int]) -> int:
    """The hash of a context given oldest token first."""
    value = int(ngram.HASH_SEED)
    for token in reversed(context):
        value = ((value ^ ((token + int(ngram._HASH_ADD)) & _MASK)) * int(ngram._HASH_MULTIPLY)) & (
            _MASK
        )
        value ^= value >> 32
    return value


@dataclass
class Row:
    """One context: its hash words, total, stamp and slots ``[token, count]`` in order."""

    low: int
    high: int
    total: int = 0
    stamp: int = 0
    slots: list[list[int]] = field(default_factory=list)

    def count(self, token: int, stamp: int) -> None:
        if self.total + 1 > ngram.MAX_TOTAL:
            self.halve()
        slot = next((slot for slot in self.slots if slot[0] == token), None)
        if slot is None and len(self.slots) == ngram.NUM_SLOTS:
            last = self.slots[-1]
            if last[1] > 1:
                last[1] -= 1
                self.total, self.stamp = self.total + 1, stamp
                return
            self.slots.pop()
            slot = [token, 0]
            self.slots.append(slot)
        elif slot is None:
            slot = [token, 0]
            self.slots.append(slot)
        if slot[1] + 1 > ngram.MAX_COUNT:
            self.halve()
        slot[1] += 1
        at = self.slots.index(slot)
        while at > 0 and self.slots[at - 1][1] <= slot[1]:
            self.slots[at - 1], self.slots[at] = self.slots[at], self.slots[at - 1]
            at -= 1
        self.total, self.stamp = self.total + 1, stamp

    def halve(self) -> None:
        self.total //= 2
        for slot in self.slots:
            slot[1] //= 2
        self.slots = [slot for slot in self.slots if slot[1]]


class ReferenceTable:
    """The n-gram table with lists for buckets."""

    def __init__(self, num_buckets: int, max_buckets: int) -> None:
        self.buckets: list[list[Row]] = [[] for _ in range(num_buckets)]
        self.max_buckets = max_buckets
        self.num_added = 0

    def bucket_of(self, high: int) -> int:
        size = 1
        while size < len(self.buckets):
            size *= 2
        index = high % size
        return index if index < len(self.buckets) else index % (size // 2)

    def insert(self, tokens: list[int], begin: int, orders: list[int], stamp: int) -> None:
        for position in range(begin, len(tokens)):
            for order in orders:
                if order <= position:
                    context = tokens[position - order : position]
                    self._row(context_hash(context), stamp).count(tokens[position], stamp)
            while (
                self.num_added > len(self.buckets) * ngram.ROWS_PER_BUCKET
                and len(self.buckets) < self.max_buckets
            ):
                self._split()

    def _row(self, value: int, stamp: int) -> Row:
        low, high = (value & 0xFFFFFFFF) | 1, value >> 32
        bucket = self.buckets[self.bucket_of(high)]
        for row in bucket:
            if (row.low, row.high) == (low, high):
                return row
        self.num_added += 1
        new = Row(low, high)
        if len(bucket) < ngram.BUCKET_ROWS:
            bucket.append(new)
        else:
            values = [self._value(row, stamp) for row in bucket]
            bucket[values.index(min(values))] = new
        return new

    @staticmethod
    def _value(row: Row, stamp: int) -> int:
        age = max(0, stamp - row.stamp)
        return (((row.total << 16) >> min(age >> ngram.AGE_SHIFT, 40)) << 16) + row.stamp

    def _split(self) -> None:
        added = len(self.buckets)
        highest = 1 << (added.bit_length() - 1)
        source = self.buckets[added - highest]
        self.buckets.append([row for row in source if row.high & highest])
        self.buckets[added - highest] = [row for row in source if not row.high & highest]

    def find(self, context: list[int]) -> Row | None:
        value = context_hash(context)
        low, high = (value & 0xFFFFFFFF) | 1, value >> 32
        bucket = self.buckets[self.bucket_of(high)]
        return next((row for row in bucket if (row.low, row.high) == (low, high)), None)


def read_table(rows: ngram.Rows, num_buckets: int) -> list[list[Row]]:
    """The content of a compiled table in the reference's form."""
    buckets = []
    for bucket in range(num_buckets):
        found = []
        for index in range(bucket * ngram.BUCKET_ROWS, (bucket + 1) * ngram.BUCKET_ROWS):
            words = [int(word) for word in rows[index]]
            if not words[0]:
                break
            slots = [[word & ngram.MAX_TOKEN_ID, word >> 20] for word in words[3:] if word]
            found.append(Row(words[0], words[1], words[2] & 0xFFFF, words[2] >> 16, slots))
        buckets.append(found)
    return buckets
