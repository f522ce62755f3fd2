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
from hdserve.engine.attention.gpu_tree_metadata import TreeAttentionMetadata
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.packed_rows import PackedRows, pack_rows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.kernels import splits
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree
from tests.chunks import brute_force

NUM_ROWS = 128


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    num_drafts = draw(st.integers(0, 31))
    tree = DraftTree(1, num_drafts)
    for token_id in range(num_drafts):
        shallow = [node for node, depth in enumerate(tree.depths) if depth < splits.MAX_DEPTH]
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


def make_seen(num_rows: int = NUM_ROWS, num_groups: int = 1) -> TreeAttentionMetadata:
    return TreeAttentionMetadata(num_rows, num_groups, torch.device("cpu"))


def items_of(seen: TreeAttentionMetadata) -> npt.NDArray[np.int32]:
    """``[num_items, ITEM_FIELDS]``."""
    number = int(seen.items[0, splits.NUM_ITEMS])
    found: npt.NDArray[np.int32] = seen.items[1 : 1 + number].numpy()
    return found


def sizes_of_splits(shift: int) -> list[int]:
    """Of the first splits, the same for every sequence."""
    return [
        (splits.SPLIT << shift) << (index // splits.SPLITS_PER_SIZE)
        for index in range(16 * splits.SPLITS_PER_SIZE)
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
                body, size = fields[splits.BODY_SIZE], fields[splits.TAIL_SIZE]
                assert fields[splits.ROW_POSITION] == node.position
                assert body == max(
                    0, (node.position - splits.MAX_DEPTH) // splits.STEP * splits.STEP
                )
                tail = fields[splits.TAIL_ROWS : splits.TAIL_ROWS + size]
                wanted = [start + column for column in sorted(node.seen)]
                assert [*range(start, start + body), *tail] == wanted
                row += 1


@pytest.mark.parametrize("num_groups", [1, 2, 3, 8])
@given(chunks=tree_lists())
def test_items_are_all_splits_and_tails(num_groups: int, chunks: list[Chunk]) -> None:
    """Each once, of tiles that together are all rows."""
    rows_per_tile = max(4, 16 >> (num_groups - 1).bit_length())
    seen = make_seen(num_groups=num_groups)
    seen.fill(packed_rows(chunks))
    seen.send()
    tiles = [
        (row, min(rows_per_tile, first + chunk.num_rows - row), chunk)
        for first, chunk in packed_rows(chunks).chunks.placed
        for row in range(first, first + chunk.num_rows, rows_per_tile)
    ]
    by_tile = defaultdict(list)
    for item in items_of(seen).tolist():
        by_tile[item[splits.TILE]].append(item)
    assert set(by_tile) == set(range(len(tiles)))
    slot = 0
    for number, (first_row, num_rows, chunk) in enumerate(tiles):
        items, start = by_tile[number], chunk.segment.start
        longest = int(seen.rows[first_row : first_row + num_rows, splits.BODY_SIZE].max())
        positions = [
            position
            for item in items
            for position in range(item[splits.SPLIT_FIRST], item[splits.SPLIT_STOP])
        ]
        assert positions == list(range(longest))
        of_splits = [item for item in items if item[splits.SPLIT_STOP]]
        assert [item[splits.SPLIT_NUMBER] for item in of_splits] == list(range(len(of_splits)))
        sizes = [item[splits.SPLIT_STOP] - item[splits.SPLIT_FIRST] for item in of_splits]
        assert sizes[:-1] == sizes_of_splits(0)[: len(sizes)][:-1]
        tails = [
            item[splits.FIRST_TAIL] + index
            for item in items
            for index in range(item[splits.NUM_TAILS])
        ]
        is_single = chunk.num_rows == 1 and len(of_splits) <= 1
        assert tails == ([] if is_single else list(range(num_rows)))
        stops = [item[splits.SINGLE_STOP] for item in items]
        assert stops == ([chunk.first_column + 1] if is_single else [0] * len(items))
        for item in items:
            assert item[splits.TILE_ROW : splits.TILE_SLOT + 1] == [
                first_row,
                num_rows,
                start,
                slot,
            ]
            assert item[splits.TILE_SPLITS : splits.TILE_ITEMS + 1] == [len(of_splits), len(items)]
        apart = len(of_splits) + -(-num_rows // splits.TAILS_TOGETHER)
        assert len(items) == (1 if is_single else apart)
        slot += 0 if is_single else len(of_splits) + 1
    assert seen.items[0, splits.NUM_REAL_ROWS] == sum(chunk.num_rows for chunk in chunks)


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
        number = splits.TAIL_ROWS
        assert drafted.rows[row, :number].tolist() == alone.rows[0, :number].tolist()


def test_splits_are_larger_where_there_are_too_many() -> None:
    """64 sequences, each with 60,000 tokens."""
    chunks = [
        Chunk(Segment(number * 70_000, 70_000), 60_000, [1], DraftTree(1, 0))
        for number in range(64)
    ]
    seen = make_seen(64)
    seen.fill(packed_rows(chunks, 64))
    seen.send()
    items = items_of(seen).tolist()
    shift = (items[0][splits.SPLIT_STOP] // splits.SPLIT).bit_length() - 1
    assert shift > 0
    num_slots = items[-1][splits.TILE_SLOT] + items[-1][splits.TILE_SPLITS] + 1
    assert splits.MAX_SPLITS // 4 < num_slots <= splits.MAX_SPLITS
    for item in items:
        size = item[splits.SPLIT_STOP] - item[splits.SPLIT_FIRST]
        assert size <= sizes_of_splits(shift)[item[splits.SPLIT_NUMBER]]


def test_nothing_is_no_item() -> None:
    seen = make_seen()
    seen.fill(packed_rows([]))
    seen.send()
    assert seen.items[0, :2].tolist() == [0, 0]
