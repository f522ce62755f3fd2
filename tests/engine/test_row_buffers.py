"""What rows see, as a GPU reads it, equals the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.engine.block_attention import visible_in
from hdserve.engine.chunk import Chunk
from hdserve.engine.kv_cache import KVCache, KVShape, Segment
from hdserve.engine.packed_rows import pack_rows
from hdserve.engine.row_buffers import KEYS_PER_BLOCK, ROWS_PER_BLOCK, RowBuffers
from hdserve.engine.shapes import Shapes
from hdserve.tree import DraftTree
from tests.chunks import brute_force, chunk_lists

CPU = torch.device("cpu")
NOTHING = torch.tensor(0)


def make_cache(num_rows: int = 640) -> KVCache:
    return KVCache(KVShape.of_equal_layers(1, 1, 1, 1), num_rows, torch.float32, CPU)


def visible(buffers: RowBuffers, cache: KVCache, window: int | None) -> torch.Tensor:
    """``[num_rows, stored rows of the cache]``."""
    rows = torch.arange(buffers.num_rows)[:, None]
    keys = torch.arange(cache.num_stored_rows)[None, :]
    return visible_in(buffers, window)(NOTHING, NOTHING, rows, keys)


@pytest.mark.parametrize("num_rows", [128, 192])
@pytest.mark.parametrize("window", [None, 5])
@given(lists=st.lists(chunk_lists(), min_size=1, max_size=2))
def test_rows_see_what_they_should(
    lists: list[list[Chunk]], window: int | None, num_rows: int
) -> None:
    """Step after step in the same place, whatever was there before; padding sees nothing, and no
    key that a row sees lies outside the blocks of its part."""
    cache = make_cache()
    buffers = RowBuffers(cache, num_rows, 12)
    for chunks in lists:
        packed = pack_rows(chunks, Shapes((num_rows,)), cache.scratch_row)
        buffers.fill(packed)
        assert buffers.token_ids[0].tolist() == packed.token_ids.tolist()
        assert buffers.position_ids[0].tolist() == packed.position_ids.tolist()
        assert buffers.kv_rows.tolist() == packed.kv_rows.tolist()
        wanted: list[set[int]] = []
        for chunk in chunks:
            nodes = brute_force(chunk)
            positions = {node.column: node.position for node in nodes}
            for node in nodes:
                near = {
                    column
                    for column in node.seen
                    if window is None or node.position - positions.get(column, column) < window
                }
                wanted.append({chunk.segment.start + column for column in near})
        wanted += [set()] * (num_rows - len(wanted))
        found = visible(buffers, cache, window)
        assert [set(row.nonzero()[:, 0].tolist()) for row in found] == wanted
        for part, number in enumerate(buffers.num_blocks[0, 0].tolist()):
            blocks = buffers.blocks[0, 0, part, :number].tolist()
            rows = wanted[part * ROWS_PER_BLOCK : (part + 1) * ROWS_PER_BLOCK]
            assert {key // KEYS_PER_BLOCK for row in rows for key in row} <= set(blocks)
            assert len(set(blocks)) == number


def test_trees_of_more_nodes_than_a_word_has_bits() -> None:
    """A chain and siblings of 80 nodes."""
    cache = make_cache()
    tree = DraftTree(1, 80)
    tree.add_path(list(range(2, 42)), Source.OTHER)
    for _ in range(40):
        tree.add_node(20, 1, Source.OTHER)
    chunk = Chunk(Segment(96, 128), 7, [1], tree)
    buffers = RowBuffers(cache, 128, 80)
    buffers.fill(pack_rows([chunk], Shapes((128,)), cache.scratch_row))
    found = visible(buffers, cache, None)
    for row, node in enumerate(brute_force(chunk)):
        assert set(found[row].nonzero()[:, 0].tolist()) == {96 + column for column in node.seen}


@pytest.mark.parametrize("num_rows", [1, 8, 128])
def test_they_lie_as_in_tensors_of_their_own(num_rows: int) -> None:
    """Which a model is compiled for; it would be once more for each number of rows."""
    buffers = RowBuffers(make_cache(), num_rows, 4)
    for found in (buffers.token_ids, buffers.position_ids):
        assert found.stride() == torch.empty(1, num_rows).stride()
    assert buffers.logit_rows.is_contiguous()


def test_rows_that_are_all_nodes_all_have_logits() -> None:
    """So that a graph of so many rows has as many logits each time."""
    cache = make_cache()
    buffers = RowBuffers(cache, 8, 4)
    buffers.fill(pack_rows([Chunk(Segment(0, 32), 3, [1], DraftTree(1, 0))], Shapes((8,)), 640))
    assert buffers.logit_rows.tolist() == list(range(8))
    within = Chunk(Segment(0, 32), 3, [1, 2, 3], DraftTree(3, 0))
    buffers.fill(pack_rows([within], Shapes((8,)), 640))
    assert buffers.logit_rows[:1].tolist() == [2]
