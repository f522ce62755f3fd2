"""What rows see, as attention by blocks reads it, equals the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.engine.attention.flex import visible_in
from hdserve.engine.attention.flex_metadata import (
    KEYS_PER_BLOCK,
    ROWS_PER_BLOCK,
    FlexAttentionMetadata,
)
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.packed_rows import pack_rows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree
from tests.chunks import brute_force, chunk_lists
from tests.engine.caches import make_cache

NOTHING = torch.tensor(0)


def visible(seen: FlexAttentionMetadata, cache: KVCache, window: int | None) -> torch.Tensor:
    """``[num_rows, stored rows of the cache]``."""
    rows = torch.arange(seen.num_rows)[:, None]
    keys = torch.arange(cache.num_stored_rows)[None, :]
    return visible_in(seen, window)(NOTHING, NOTHING, rows, keys)


@pytest.mark.parametrize("num_rows", [128, 192])
@pytest.mark.parametrize("window", [None, 5])
@given(lists=st.lists(chunk_lists(), min_size=1, max_size=2))
def test_rows_see_what_they_should(
    lists: list[list[Chunk]], window: int | None, num_rows: int
) -> None:
    """Step after step in the same place, whatever was there before; padding sees nothing, and no
    key that a row sees lies outside the blocks of its part."""
    cache = make_cache()
    seen = FlexAttentionMetadata(cache, num_rows, 12)
    for chunks in lists:
        packed = pack_rows(chunks, Shapes((num_rows,)), cache.scratch_row)
        seen.fill(packed)
        seen.send()
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
        found = visible(seen, cache, window)
        assert [set(row.nonzero()[:, 0].tolist()) for row in found] == wanted
        for part, number in enumerate(seen.num_blocks[0, 0].tolist()):
            blocks = seen.blocks[0, 0, part, :number].tolist()
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
    seen = FlexAttentionMetadata(cache, 128, 80)
    seen.fill(pack_rows([chunk], Shapes((128,)), cache.scratch_row))
    seen.send()
    found = visible(seen, cache, None)
    for row, node in enumerate(brute_force(chunk)):
        assert set(found[row].nonzero()[:, 0].tolist()) == {96 + column for column in node.seen}
