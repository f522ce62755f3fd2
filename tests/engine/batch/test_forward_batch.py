"""What each row of a packed forward is, where it is written, and what it sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve.core import Source
from hdserve.databases.cache_lines import address_of
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import ForwardBatch, build_batch
from hdserve.engine.batch.placed_chunks import PlacedChunks
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.visible_columns import list_columns
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree
from tests.chunks import brute_force, chunk_lists
from tests.engine.caches import make_cache

SHAPES = st.sampled_from([Shapes(), Shapes((16, 48, 96), True), Shapes((8, 64))])


@given(chunks=chunk_lists(), shapes=SHAPES)
def test_rows_are_what_they_should_be(chunks: list[Chunk], shapes: Shapes) -> None:
    """Tokens, positions, cache rows and visible keys equal a brute-force computation."""
    cache = make_cache()
    batch = build_batch(chunks, cache, shapes, None, Workers())
    row = 0
    for chunk, span in zip(chunks, batch.plan.spans, strict=True):
        nodes = brute_force(chunk)
        assert (span.first_row, span.chunk) == (row, chunk)
        visible = span.visible()
        assert visible.shape == (len(nodes), span.num_keys)
        for index, node in enumerate(nodes):
            assert int(batch.token_ids[row + index]) == node.token_id
            assert int(batch.position_ids[row + index]) == node.position
            assert int(batch.plan.kv_rows[row + index]) == chunk.segment.start + node.column
            assert set(np.flatnonzero(visible[index])) == node.seen
        row += len(nodes)


def test_rows_of_a_prompt_are_shared_by_threads() -> None:
    """In whole tiles of queries, so that each row is attended for as before."""
    chunks = [Chunk(Segment(0, 200), 9, [1] * 100, None), Chunk(Segment(224, 64), 50, [1], None)]
    listed = list_columns(PlacedChunks.of([(0, chunks[0]), (100, chunks[1])]), 101)
    cut = [[0, 32, 0], [32, 32, 0], [64, 32, 0], [96, 4, 0], [100, 1, 224]]
    assert listed.spans.tolist() == cut
    assert listed.addresses[:2].tolist() == [address_of(listed.spans), 5]


@given(chunks=chunk_lists(), num_padding=st.integers(0, 5))
def test_rows_list_what_they_see_by_position(chunks: list[Chunk], num_padding: int) -> None:
    """The compiled attention gets the columns of the same brute-force computation, in the order of
    their positions, and none for rows of padding."""
    firsts = [sum(chunk.num_rows for chunk in chunks[:index]) for index in range(len(chunks))]
    num_rows = sum(chunk.num_rows for chunk in chunks)
    listed = list_columns(PlacedChunks.of(zip(firsts, chunks, strict=True)), num_rows + num_padding)
    for (first, num, first_key), chunk in zip(listed.spans, chunks, strict=True):
        nodes = brute_force(chunk)
        assert (num, first_key) == (len(nodes), chunk.segment.start)
        positions = {node.column: node.position for node in nodes}
        for index, node in enumerate(nodes):
            prefix, tail, visible = listed.rows[first + index].tolist()
            found = [*range(prefix), *listed.tails[tail : tail + visible - prefix].tolist()]
            assert set(found) == node.seen
            assert [positions.get(column, column) for column in found] == list(range(visible))
    assert not listed.rows[num_rows:].any()
    assert listed.most_visible == max(len(node.seen) for c in chunks for node in brute_force(c))


@given(chunks=chunk_lists(), shapes=SHAPES)
def test_padding_touches_nothing(chunks: list[Chunk], shapes: Shapes) -> None:
    """Padding rows write to the scratch row, are chosen from by nobody, and keep the shape."""
    cache = make_cache()
    batch = build_batch(chunks, cache, shapes, None, Workers())
    num_own = sum(chunk.num_rows for chunk in chunks)
    num_rows = len(batch.token_ids)
    assert batch.position_ids.shape == (num_rows,)
    assert shapes.pad_rows(num_rows) == num_rows
    padding = batch.plan.kv_rows[num_own:]
    assert (padding == cache.scratch_row).all()
    assert not (batch.plan.kv_rows[:num_own] == cache.scratch_row).any()
    assert len(set(batch.plan.kv_rows[:num_own].tolist())) == num_own
    assert not batch.position_ids[num_own:].any()
    assert all(int(row) < num_own for row in batch.logit_rows)


@given(chunks=chunk_lists())
def test_logits_are_those_of_the_nodes(chunks: list[Chunk]) -> None:
    """Each tree gets the rows of its nodes in order, the root's first; a chunk inside a prompt
    gets none.  The first tokens of a chunk that are scored get theirs behind all of them."""
    batch = build_batch(chunks, make_cache(), Shapes(), None, Workers())
    row = 0
    num_logits = batch.packed.num_nodes
    for index, (chunk, part) in enumerate(zip(chunks, batch.packed.logit_slices, strict=True)):
        rows = batch.logit_rows[part].tolist()
        if chunk.tree is None:
            assert rows == []
        else:
            tokens = [int(batch.token_ids[node]) for node in rows]
            assert tokens == chunk.tree.token_ids
            assert rows[0] == row + len(chunk.token_ids) - 1
            assert part.stop <= batch.packed.num_nodes
        scored = batch.logit_rows[batch.packed.scored_slices.get(index, slice(0))].tolist()
        assert scored == [*range(row, row + chunk.num_scored_tokens)]
        num_logits += len(scored)
        row += chunk.num_rows
    assert len(batch.logit_rows) == num_logits


@given(chunks=chunk_lists(), window=st.integers(1, 30))
def test_sliding_windows_count_positions(chunks: list[Chunk], window: int) -> None:
    """With a window a row sees the last ``window`` positions before and with its own, and siblings
    in a tree do not use it up."""
    batch = build_batch(chunks, make_cache(), Shapes(), None, Workers())
    masks = batch.plan.masks(window, torch.zeros(1))
    for chunk, mask in zip(chunks, masks, strict=True):
        nodes = brute_force(chunk)
        position_of = {node.column: node.position for node in nodes}
        for index, node in enumerate(nodes):
            wanted = {
                column
                for column in node.seen
                if node.position - position_of.get(column, column) < window
            }
            seen = (mask[0, 0, index] == 0).nonzero()[:, 0].tolist()
            assert set(seen) == wanted
            assert node.column in wanted


def make_batch() -> ForwardBatch:
    tree = DraftTree(2, 4)
    tree.add_path([3], Source.OTHER)
    tree.add_path([4, 5], Source.OTHER)
    return build_batch(
        [Chunk(Segment(0, 32), 1, [1, 2], tree)], make_cache(), Shapes(), None, Workers()
    )


def test_the_drawing() -> None:
    """The mask is the one of the documentation."""
    visible = make_batch().plan.spans[0].visible()[:, :6].astype(int).tolist()
    assert visible == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_made_once_and_in_the_models_dtype(dtype: torch.dtype) -> None:
    """Layers of one window share a mask of zeros and minus infinity in their own dtype."""
    plan = make_batch().plan
    like = torch.zeros(1, dtype=dtype)
    mask = plan.masks(None, like)[0]
    assert mask.dtype == dtype
    assert mask.shape == (1, 1, 5, 32)
    assert set(mask.unique().tolist()) == {0.0, -torch.inf}
    assert plan.masks(None, like)[0] is mask
    assert plan.masks(2, like)[0] is not mask


@given(counts=st.lists(st.integers(1, 200), unique=True, max_size=5), num_rows=st.integers(1, 300))
def test_pad_rows_takes_the_next_allowed_count(counts: list[int], num_rows: int) -> None:
    """A forward grows to the next allowed row count; beyond the largest it stays as it is."""
    found = Shapes(tuple(sorted(counts))).pad_rows(num_rows)
    larger = [count for count in counts if count >= num_rows]
    assert found == (min(larger) if larger else num_rows)
