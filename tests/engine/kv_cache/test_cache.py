"""Segments never overlap and never leak, and accepted rows arrive where they are committed."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import ROW_ALIGNMENT, Owned, Segment, align
from tests.engine.caches import equal_layers

SHAPE = equal_layers(num_layers=2, num_heads=3, key_size=4, value_size=5)
CPU = torch.device("cpu")


def make_cache(num_rows: int = 320) -> KVCache:
    return KVCache(SHAPE, num_rows, torch.float32, CPU)


class CacheMachine(RuleBasedStateMachine):
    """Allocates and frees in any order, beside a model of which row belongs to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.segments: list[Segment] = []

    @rule(num_rows=st.integers(1, 200))
    def allocate(self, num_rows: int) -> None:
        segment = self.cache.rows.allocate(num_rows)
        if segment is None:
            assert self.largest_gap() < align(num_rows)
        else:
            assert num_rows <= segment.num_rows < num_rows + ROW_ALIGNMENT
            assert segment.start % ROW_ALIGNMENT == 0
            self.segments.append(segment)

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.segments) - 1))
        self.cache.rows.free(self.segments.pop(index))

    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        num_free_rows = self.cache.rows.num_free
        wanted = []
        for segment in self.segments:
            num_more = data.draw(st.integers(0, num_free_rows // ROW_ALIGNMENT)) * ROW_ALIGNMENT
            wanted.append(segment.num_rows + num_more)
            num_free_rows -= num_more
        self.segments = self.cache.compact(
            [Owned(segment, 0, rows) for segment, rows in zip(self.segments, wanted, strict=True)]
        )
        assert [segment.num_rows for segment in self.segments] == wanted
        assert self.largest_gap() == num_free_rows

    @precondition(lambda self: self.cache.rows.gaps)
    @rule(data=st.data(), to_end=st.booleans())
    def push(self, data: st.DataObject, to_end: bool) -> None:
        """All that lie between two gaps, those gaps included."""
        gaps = self.cache.rows.gaps
        first = data.draw(st.integers(0, len(gaps) - 1))
        last = data.draw(st.integers(first, len(gaps) - 1))
        start, end = gaps[first].start, gaps[last].end
        between = [each for each in self.segments if start <= each.start < end]
        between.sort(key=lambda segment: segment.start)
        moved = self.cache.push(between, start, end, end if to_end else start)
        assert [each.num_rows for each in moved] == [each.num_rows for each in between]
        num_rows = sum(each.num_rows for each in moved)
        gap = Segment(start if to_end else start + num_rows, end - start - num_rows)
        assert self.cache.rows.gaps == (*gaps[:first], gap, *gaps[last + 1 :])
        self.segments = [each for each in self.segments if each not in between] + moved

    def owned(self) -> list[int]:
        return [
            row
            for segment in self.segments
            for row in range(segment.start, segment.start + segment.num_rows)
        ]

    def largest_gap(self) -> int:
        taken = set(self.owned())
        longest = length = 0
        for row in range(self.cache.num_rows):
            length = 0 if row in taken else length + 1
            longest = max(longest, length)
        return longest

    @invariant()
    def nothing_overlaps(self) -> None:
        rows = self.owned()
        assert len(rows) == len(set(rows))
        assert all(0 <= row < self.cache.num_rows for row in rows)
        assert self.cache.rows.num_free == self.cache.num_rows - len(rows)

    def teardown(self) -> None:
        for segment in self.segments:
            self.cache.rows.free(segment)
        assert self.cache.rows.allocate(self.cache.num_rows) == Segment(0, self.cache.num_rows)


TestSegments = CacheMachine.TestCase
TestSegments.settings = settings(max_examples=40, stateful_step_count=25)


def by_head(rows: torch.Tensor) -> torch.Tensor:
    """``[n, heads, size]`` as ``[1, heads, n, size]``."""
    return rows.transpose(0, 1).unsqueeze(0)


def fill(cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Write different numbers everywhere; what each layer then holds."""
    rows = cache.num_rows
    keys = torch.arange(rows * 12, dtype=torch.float32).view(rows, 3, 4)
    values = -torch.arange(rows * 15, dtype=torch.float32).view(rows, 3, 5)
    for layer in range(SHAPE.num_layers):
        cache.write(layer, torch.arange(rows), by_head(keys + layer), by_head(values - layer))
    return keys, values


@given(
    moves=st.lists(
        st.tuples(st.integers(0, 31), st.integers(0, 31)), unique_by=lambda move: move[1]
    )
)
def test_keep_moves_all_at_once(moves: list[tuple[int, int]]) -> None:
    """Every target gets what its source held before, in all layers, even where moves cross."""
    cache = make_cache(32)
    keys, values = fill(cache)
    cache.keep(moves)
    for layer in range(SHAPE.num_layers):
        found_keys, found_values = cache.read(layer, 0, 32)
        wanted_keys, wanted_values = keys + layer, values - layer
        for source, target in moves:
            wanted_keys[target] = (keys + layer)[source]
            wanted_values[target] = (values - layer)[source]
        assert torch.equal(found_keys[0].transpose(0, 1), wanted_keys)
        assert torch.equal(found_values[0].transpose(0, 1), wanted_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 8, 32, 48])
def test_rows_of_all_sizes_move(dtype: torch.dtype, size: int) -> None:
    """By the kernel or without it: all bits of the rows, and of no others."""
    cache = KVCache(equal_layers(2, 3, size, 2 * size), 64, dtype, CPU)
    held = [stored for layer in range(2) for stored in cache.read_all(layer)]
    for stored in held:
        stored.copy_(torch.randn(stored.shape))
    wanted = [stored.clone() for stored in held]
    cache.keep([(9, 3), (3, 9), (60, 4), (5, 5)])
    for stored, before in zip(held, wanted, strict=True):
        expected = before.clone()
        expected[:, :, [3, 9, 4]] = before[:, :, [9, 3, 60]]
        assert torch.equal(stored, expected)


@pytest.mark.parametrize(("source", "target"), [(100, 0), (0, 100), (1500, 0), (0, 1500)])
def test_many_rows_move_over_themselves(source: int, target: int) -> None:
    """Rows are copied piece by piece where they overlap those they go to, in either direction."""
    cache = make_cache(5000)
    keys, values = fill(cache)
    cache.copy(source, target, 3000)
    found_keys, found_values = cache.read(0, target, 3000)
    assert torch.equal(found_keys, by_head(keys[source : source + 3000]))
    assert torch.equal(found_values, by_head(values[source : source + 3000]))


@pytest.mark.parametrize("to_end", [False, True])
def test_what_is_pushed_keeps_what_it_holds(to_end: bool) -> None:
    """In order, also where rows move over themselves."""
    cache = make_cache(320)
    keys, _ = fill(cache)
    held = Segment(32, 64), Segment(160, 64), Segment(224, 64)
    for segment in held:
        assert cache.rows.allocate_at(segment.start, segment.num_rows) == segment
    moved = cache.push(held[:2], 0, 224, 224 if to_end else 0)
    starts = (96, 160) if to_end else (0, 64)
    assert moved == [Segment(start, 64) for start in starts]
    for old, new in zip(held, [*moved, held[2]], strict=True):
        found, _ = cache.read(0, new.start, new.num_rows)
        assert torch.equal(found, by_head(keys[old.start : old.end]))


def test_write_and_read_are_inverse() -> None:
    """Rows come back in order, whatever the order they were written in."""
    cache = make_cache(64)
    order = list(range(10, 50))
    random.Random(0).shuffle(order)
    keys, values = torch.randn(40, 3, 4), torch.randn(40, 3, 5)
    cache.write(1, torch.tensor(order), by_head(keys), by_head(values))
    found_keys, found_values = cache.read(1, 10, 40)
    assert found_keys.shape == (1, 3, 40, 4)
    assert found_values.shape == (1, 3, 40, 5)
    for index, row in enumerate(order):
        assert torch.equal(found_keys[0, :, row - 10], keys[index])
        assert torch.equal(found_values[0, :, row - 10], values[index])
    assert not cache.read(0, 0, 64)[0].any(), "another layer was written"
    assert not cache.read(1, 0, 10)[0].any(), "other rows were written"


def test_what_is_no_number_is_seen_only_by_its_own_sequence() -> None:
    """Where all rows are read together: hidden keys do no harm, and a value of a weight of 0 adds
    nothing; who sees the row sees that it is no number."""
    cache = make_cache(64)
    keys, values = torch.randn(4, 3, 4), torch.randn(4, 3, 5)
    values[1, 2, 3], values[2, 0, 0] = torch.nan, -torch.inf
    cache.is_read_whole = True
    cache.write(0, torch.arange(4), by_head(keys), by_head(values))
    found_keys, found_values = cache.read_all(0)
    assert found_values.isfinite().all()
    assert torch.equal(found_values[0, :, [0, 3]].transpose(0, 1), values[[0, 3]])
    is_number = found_keys[0, :, :4].isfinite().all(dim=-1)
    assert is_number.tolist() == [
        [True, True, False, True],
        [True, True, True, True],
        [True, False, True, True],
    ]


def test_padding_has_a_row_of_its_own() -> None:
    """What padding rows write lands where no sequence can own a row, and a segment at the very end
    can be read to the next multiple of any key alignment."""
    cache = make_cache(64)
    last = cache.rows.allocate(64)
    assert last is not None
    assert cache.scratch_row >= last.start + last.num_rows
    cache.write(
        0, torch.tensor([cache.scratch_row]), *(torch.ones(1, 3, 1, size) for size in (4, 5))
    )
    assert not cache.read(0, 0, 64)[0].any()


def test_a_forgotten_segment_is_our_own_fault() -> None:
    """Rows that nobody names are not given away."""
    cache = make_cache()
    cache.rows.allocate(64)
    with pytest.raises(AssertionError):
        cache.compact([])


def test_growing_beyond_the_rows_is_our_own_fault() -> None:
    cache = make_cache()
    segment = cache.rows.allocate(64)
    assert segment is not None
    with pytest.raises(AssertionError, match="no room to grow"):
        cache.compact([Owned(segment, 0, cache.num_rows + ROW_ALIGNMENT)])


def test_bytes_per_token() -> None:
    """The memory of a token is that of its keys and values in all layers."""
    assert SHAPE.bytes_per_token(torch.bfloat16) == 2 * 3 * (4 + 5) * 2
    cache = KVCache(SHAPE, 320, torch.float64, CPU)
    assert cache.num_rows == 320
    stored = sum(tensor.nbytes for tensor in cache._stored)
    assert stored == SHAPE.bytes_per_token(torch.float64) * cache.num_stored_rows
    assert 320 + ROW_ALIGNMENT <= cache.num_stored_rows < 320 + 2 * 128
