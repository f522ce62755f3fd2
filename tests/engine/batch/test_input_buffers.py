"""What rows are, as a GPU reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.input_buffers import InputBuffers
from hdserve.engine.batch.packed_rows import pack_rows
from hdserve.engine.batch.races import Race, races_on
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree
from tests.chunks import chunk_lists
from tests.engine.caches import make_cache


@given(lists=st.lists(chunk_lists(), min_size=1, max_size=2))
def test_steps_lie_in_the_same_place(lists: list[list[Chunk]]) -> None:
    """Whatever was there before."""
    cache = make_cache()
    buffers = InputBuffers(cache, 128)
    for number, chunks in enumerate(lists):
        chunks = [*chunks]
        if number == 0:
            chunks = [
                replace(each, race=Race(range(len(each.tree)), 0.5)) if each.tree else each
                for each in chunks
            ]
        packed = pack_rows(chunks, Shapes((128,)), cache.scratch_row)
        buffers.fill(packed)
        buffers.send()
        assert buffers.token_ids.tolist() == packed.token_ids.tolist()
        assert buffers.position_ids.tolist() == packed.position_ids.tolist()
        assert buffers.kv_rows.tolist() == packed.kv_rows.tolist()
        keys, factors = buffers.races[0].tolist(), buffers.races[1].view(torch.float64).tolist()
        for chunk, part in zip(chunks, packed.logit_slices, strict=True):
            if chunk.race is not None:
                assert keys[part] == [*chunk.race.keys]
        num_drawn = 0 if number else packed.num_nodes
        assert factors == [0.5] * num_drawn + [0.0] * (128 - num_drawn)


@pytest.mark.parametrize("num_rows", [1, 8, 128])
def test_they_lie_as_in_tensors_of_their_own(num_rows: int) -> None:
    """Which a model is compiled for; it would be once more for each number of rows."""
    buffers = InputBuffers(make_cache(), num_rows)
    for found in (buffers.token_ids, buffers.position_ids, buffers.logit_rows):
        assert found.shape == (num_rows,)
        assert found.stride() == (1,)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_races_lie_where_kernels_expect_them(num_rows: int) -> None:
    """At multiples of 16 bytes; for others they would be compiled in the middle of serving."""
    races = races_on(torch.device("cpu"), num_rows, [(slice(num_rows), Race([5] * num_rows, 2.0))])
    assert races.shape == (2, num_rows)
    assert races.stride(0) % 2 == 0
    assert races[0].tolist() == [5] * num_rows
    assert races[1].view(torch.float64).tolist() == [2.0] * num_rows
    assert InputBuffers(make_cache(), num_rows).races.stride(0) % 2 == 0


def test_rows_that_are_all_nodes_all_have_logits() -> None:
    """So that a graph of so many rows has as many logits each time."""
    cache = make_cache()
    buffers = InputBuffers(cache, 8)
    buffers.fill(pack_rows([Chunk(Segment(0, 32), 3, [1], DraftTree(1, 0))], Shapes((8,)), 640))
    buffers.send()
    assert buffers.logit_rows.tolist() == list(range(8))
    within = Chunk(Segment(0, 32), 3, [1, 2, 3], DraftTree(3, 0))
    buffers.fill(pack_rows([within], Shapes((8,)), 640))
    buffers.send()
    assert buffers.logit_rows[:1].tolist() == [2]
