"""Who reads which part of what rows see: all of it, once, in an order that depends on nothing but
the row's position."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.engine.chunk import Chunk
from hdserve.engine.kernels import parts
from hdserve.engine.kv_cache import Segment
from hdserve.engine.packed_rows import PackedRows, pack_rows
from hdserve.engine.seen_parts import SeenParts
from hdserve.engine.shapes import Shapes
from hdserve.tree import DraftTree
from tests.chunks import brute_force

NUM_ROWS = 128


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    num_drafts = draw(st.integers(0, 31))
    tree = DraftTree(1, num_drafts)
    for token_id in range(num_drafts):
        shallow = [node for node, depth in enumerate(tree.depths) if depth < parts.MAX_DEPTH]
        tree.add_node(draw(st.sampled_from(shallow)), token_id, Source.OTHER)
    return tree


@st.composite
def tree_lists(draw: st.DrawFn) -> list[Chunk]:
    """Up to four sequences, apart from each other in the cache."""
    chunks, start = [], 64
    for tree in draw(st.lists(trees(), max_size=4)):
        column = draw(st.integers(0, 300) | st.sampled_from([2_150, 7_000]))
        chunks.append(Chunk(Segment(start, 10_000), column, [1], tree))
        start += 10_000
    return chunks


def packed_rows(chunks: list[Chunk], num_rows: int = NUM_ROWS) -> PackedRows:
    return pack_rows(chunks, Shapes((num_rows,)), 10_000_000)


def make_seen(num_rows: int = NUM_ROWS, num_groups: int = 1) -> SeenParts:
    return SeenParts(num_rows, num_groups, torch.device("cpu"))


def items_of(seen: SeenParts) -> npt.NDArray[np.int32]:
    """``[num_items, ITEM_FIELDS]``."""
    number = int(seen.items[0, parts.NUM_ITEMS])
    found: npt.NDArray[np.int32] = seen.items[1 : 1 + number].numpy()
    return found


def sizes_of_parts(shift: int) -> list[int]:
    """Of the first parts, the same for every sequence."""
    return [
        (parts.PART << shift) << (index // parts.PARTS_OF_A_SIZE)
        for index in range(16 * parts.PARTS_OF_A_SIZE)
    ]


@given(lists=st.lists(tree_lists(), min_size=1, max_size=2))
def test_bodies_and_tails_are_what_rows_see(lists: list[list[Chunk]]) -> None:
    """Step after step in the same place, whatever was there before."""
    seen = make_seen()
    for chunks in lists:
        seen.fill(packed_rows(chunks))
        seen.send()
        row = 0
        for chunk in chunks:
            start = chunk.segment.start
            for node in brute_force(chunk):
                fields = seen.rows[row].tolist()
                body, size = fields[parts.BODY_SIZE], fields[parts.TAIL_SIZE]
                assert fields[parts.ROW_POSITION] == node.position
                assert body == max(0, (node.position - parts.MAX_DEPTH) // parts.STEP * parts.STEP)
                tail = fields[parts.TAIL_ROWS : parts.TAIL_ROWS + size]
                wanted = [start + column for column in sorted(node.seen)]
                assert [*range(start, start + body), *tail] == wanted
                row += 1


@pytest.mark.parametrize("num_groups", [1, 2, 3, 8])
@given(chunks=tree_lists())
def test_items_are_all_parts_and_tails(num_groups: int, chunks: list[Chunk]) -> None:
    """Each once, of tiles that together are all rows."""
    rows_per_tile = max(4, 16 >> (num_groups - 1).bit_length())
    seen = make_seen(num_groups=num_groups)
    seen.fill(packed_rows(chunks))
    seen.send()
    tiles = [
        (row, min(rows_per_tile, first + chunk.num_rows - row), chunk.segment.start)
        for first, chunk in packed_rows(chunks).chunks.placed
        for row in range(first, first + chunk.num_rows, rows_per_tile)
    ]
    by_tile = defaultdict(list)
    for item in items_of(seen).tolist():
        by_tile[item[parts.TILE]].append(item)
    assert set(by_tile) == set(range(len(tiles)))
    slot = 0
    for number, (first_row, num_rows, start) in enumerate(tiles):
        items = by_tile[number]
        longest = int(seen.rows[first_row : first_row + num_rows, parts.BODY_SIZE].max())
        positions = [
            position
            for item in items
            for position in range(item[parts.PART_FIRST], item[parts.PART_STOP])
        ]
        assert positions == list(range(longest))
        of_parts = [item for item in items if item[parts.PART_STOP]]
        assert [item[parts.PART_NUMBER] for item in of_parts] == list(range(len(of_parts)))
        sizes = [item[parts.PART_STOP] - item[parts.PART_FIRST] for item in of_parts]
        assert sizes[:-1] == sizes_of_parts(0)[: len(sizes)][:-1]
        tails = [
            item[parts.FIRST_TAIL] + index
            for item in items
            for index in range(item[parts.NUM_TAILS])
        ]
        assert tails == list(range(num_rows))
        for item in items:
            assert item[parts.TILE_ROW : parts.TILE_SLOT + 1] == [first_row, num_rows, start, slot]
            assert item[parts.TILE_PARTS : parts.TILE_ITEMS + 1] == [len(of_parts), len(items)]
        apart = len(of_parts) + -(-num_rows // parts.TAILS_TOGETHER)
        assert len(items) == (1 if num_rows == 1 and len(of_parts) <= 1 else apart)
        slot += 0 if num_rows == 1 and len(of_parts) <= 1 else len(of_parts) + 1
    assert seen.items[0, parts.NUM_REAL_ROWS] == sum(chunk.num_rows for chunk in chunks)


@pytest.mark.parametrize("column", [0, 5, 40, 64, 500])
def test_a_path_is_described_as_if_it_were_decoded(column: int) -> None:
    """Apart from where in the cache its ancestors are."""
    tree = DraftTree(1, 31)
    for token_id in range(3):
        tree.add_node(0, token_id, Source.OTHER)
    node = 0
    while not tree.is_full:
        added = tree.add_node(node, 7, Source.OTHER)
        assert added is not None
        node = added
    drafted, alone = make_seen(32), make_seen(1)
    drafted.fill(packed_rows([Chunk(Segment(0, 1024), column, [1], tree)], 32))
    drafted.send()
    for row, depth in enumerate(tree.depths):
        chunk = Chunk(Segment(0, 1024), column + depth, [1], DraftTree(1, 0))
        alone.fill(packed_rows([chunk], 1))
        alone.send()
        number = parts.TAIL_ROWS
        assert drafted.rows[row, :number].tolist() == alone.rows[0, :number].tolist()


def test_parts_are_larger_where_there_are_too_many() -> None:
    """64 sequences, each with 60,000 tokens."""
    chunks = [
        Chunk(Segment(number * 70_000, 70_000), 60_000, [1], DraftTree(1, 0))
        for number in range(64)
    ]
    seen = make_seen(64)
    seen.fill(packed_rows(chunks, 64))
    seen.send()
    items = items_of(seen).tolist()
    shift = (items[0][parts.PART_STOP] // parts.PART).bit_length() - 1
    assert shift > 0
    num_slots = items[-1][parts.TILE_SLOT] + items[-1][parts.TILE_PARTS] + 1
    assert parts.MAX_PARTS // 4 < num_slots <= parts.MAX_PARTS
    for item in items:
        size = item[parts.PART_STOP] - item[parts.PART_FIRST]
        assert size <= sizes_of_parts(shift)[item[parts.PART_NUMBER]]


def test_nothing_is_no_item() -> None:
    seen = make_seen()
    seen.fill(packed_rows([]))
    seen.send()
    assert seen.items[0, :2].tolist() == [0, 0]
