"""Who reads which part of what rows see: all of it, once, in an order that depends on nothing but
the row's position."""

from __future__ import annotations

from typing import Any

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


def found_fields(seen: SeenParts) -> npt.NDArray[np.int32]:
    fields: npt.NDArray[np.int32] = seen.fields.numpy()
    return fields


def first_positions(shift: int, number: int) -> list[int]:
    """Of the first parts."""
    found, size = [0], parts.PART << shift
    while len(found) <= number:
        found += [found[-1] + size * (index + 1) for index in range(parts.PARTS_OF_A_SIZE)]
        size *= 2
    return found


def tail_of(fields: npt.NDArray[Any], row: int) -> list[int]:
    size = fields[parts.TAIL_SIZE, row]
    rows: list[int] = fields[parts.TAIL_ROWS : parts.TAIL_ROWS + size, row].tolist()
    return rows


@given(lists=st.lists(tree_lists(), min_size=1, max_size=2))
def test_bodies_and_tails_are_what_rows_see(lists: list[list[Chunk]]) -> None:
    """Step after step in the same place, whatever was there before."""
    seen = SeenParts(NUM_ROWS, torch.device("cpu"))
    for chunks in lists:
        packed = packed_rows(chunks)
        seen.fill(packed)
        fields, row = found_fields(seen), 0
        for chunk in chunks:
            start = chunk.segment.start
            for node in brute_force(chunk):
                tile, body = fields[parts.TILE, row], fields[parts.BODY_SIZE, row]
                assert fields[parts.TILE_START, tile] == start
                assert fields[parts.TILE_ROW, tile] + fields[parts.PLACE, row] == row
                assert fields[parts.TILE_SIZE, tile] >= body
                assert fields[parts.ROW_POSITION, row] == node.position
                assert body == max(0, (node.position - parts.MAX_DEPTH) // parts.STEP * parts.STEP)
                tail = tail_of(fields, row)
                in_order = sorted(tail)
                assert tail == in_order
                assert [*range(start, start + body), *tail] == [
                    start + column for column in sorted(node.seen)
                ]
                row += 1


@given(chunks=tree_lists())
def test_tiles_have_all_rows_and_parts_all_positions(chunks: list[Chunk]) -> None:
    seen = SeenParts(NUM_ROWS, torch.device("cpu"))
    seen.fill(packed_rows(chunks))
    fields = found_fields(seen)
    num_rows = sum(chunk.num_rows for chunk in chunks)
    num_tiles = sum(-(-chunk.num_rows // parts.ROWS_PER_TILE) for chunk in chunks)
    num_parts, num_items, shift = fields[parts.TOTALS, :3].tolist()
    assert num_items == num_parts + num_rows
    assert fields[parts.TILE_ROWS, :num_tiles].sum() == num_rows
    assert (fields[parts.FIRST_PART, num_tiles:] > num_items).all()
    before = 0
    for tile in range(num_tiles):
        number, size = fields[parts.TILE_PARTS, tile], fields[parts.TILE_SIZE, tile]
        starts = first_positions(shift, number)
        assert fields[parts.FIRST_PART, tile] == before
        assert starts[number] >= size
        assert number == 0 or starts[number - 1] < size
        before += number
    assert num_parts == before
    assert num_parts + num_tiles <= parts.MAX_PARTS


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
    drafted, alone = (SeenParts(num_rows, torch.device("cpu")) for num_rows in (32, 1))
    drafted.fill(packed_rows([Chunk(Segment(0, 1024), column, [1], tree)], 32))
    fields, decoded = found_fields(drafted), found_fields(alone)
    of_row = [parts.TAIL_SIZE, parts.BODY_SIZE, parts.ROW_POSITION]
    for row, depth in enumerate(tree.depths):
        chunk = Chunk(Segment(0, 1024), column + depth, [1], DraftTree(1, 0))
        alone.fill(packed_rows([chunk], 1))
        assert fields[of_row, row].tolist() == decoded[of_row, 0].tolist()


def test_parts_are_larger_where_there_are_too_many() -> None:
    """64 sequences, each with 60,000 tokens."""
    chunks = [
        Chunk(Segment(number * 70_000, 70_000), 60_000, [1], DraftTree(1, 0))
        for number in range(64)
    ]
    seen = SeenParts(64, torch.device("cpu"))
    seen.fill(packed_rows(chunks, 64))
    num_parts, _, shift = found_fields(seen)[parts.TOTALS, :3].tolist()
    assert shift > 0
    assert parts.MAX_PARTS // 4 < num_parts + 64 <= parts.MAX_PARTS
