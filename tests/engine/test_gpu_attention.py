"""Attention of draft trees by the kernel: `pytest -m gpu tests/engine/test_gpu_attention.py`."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from hdserve.core import Source
from hdserve.engine.attention.flex import BlockAttention
from hdserve.engine.attention.flex_metadata import FlexAttentionMetadata
from hdserve.engine.attention.gpu_tree_metadata import TreeAttentionMetadata
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.packed_rows import PackedRows, pack_rows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.kernels import splits
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.shape import KVShape, LayerShape
from hdserve.tree import DraftTree
from tests.engine.gpus import HAS_GPU, NEEDS_GPU

if HAS_GPU:
    from hdserve.engine.gpu_kernels.attend import GpuTreeAttention

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

_NUM_CACHE_ROWS = 32_768


class Layer(NamedTuple):
    """What attention is of."""

    num_groups: int
    num_kv_heads: int = 2
    key_size: int = 128
    value_size: int = 128
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16


LAYERS = [
    Layer(1, 32),
    Layer(4, 8),
    Layer(7),
    Layer(8, 1, 256, 256),
    Layer(3, key_size=96, window=100, softcap=30.0, has_sinks=True),
    Layer(2, key_size=192, has_sinks=True),
    Layer(16, 1, 64, 64, window=300, dtype=torch.float16),
]

WORK = [
    [(200, 0)],
    [(200, 31)],
    [(5, 3), (0, 0), (700, 20)],
    [(2600, 31)],
    [(90 + 7 * number, number % 3) for number in range(60)],
]
"""Tokens cached and drafts of sequences."""


def make_tree(num_drafts: int) -> DraftTree:
    """Narrow and deep, as far as it may be."""
    tree = DraftTree(3, num_drafts)
    choice = random.Random(num_drafts)
    for token_id in range(num_drafts):
        parents = [node for node, depth in enumerate(tree.depths) if depth < splits.MAX_DEPTH]
        tree.add_node(choice.choice(parents[-3:]), token_id, Source.OTHER)
    return tree


class Forward:
    """One layer of random numbers."""

    def __init__(self, layer: Layer, work: list[tuple[int, int]]) -> None:
        torch.manual_seed(0)
        self.layer, device = layer, torch.device("cuda")
        shape = LayerShape(layer.num_kv_heads, layer.key_size, layer.value_size)
        self.cache = KVCache(KVShape((shape,)), _NUM_CACHE_ROWS, layer.dtype, device)
        self.chunks: list[Chunk] = []
        for num_cached, num_drafts in work:
            segment = self.cache.rows.allocate(num_cached + num_drafts + 1)
            assert segment is not None
            self.chunks.append(Chunk(segment, num_cached, [3], make_tree(num_drafts)))
        self.keys, self.values = (each.normal_() for each in self.cache.read_all(0))
        self.keys[:, :, self.cache.num_rows - 32 :] = torch.nan  # rows that nobody sees
        num_heads = layer.num_groups * layer.num_kv_heads
        self.packed = self.pack(self.chunks)
        size = (1, self.packed.num_rows, num_heads, layer.key_size)
        self.query = torch.randn(size, device=device, dtype=layer.dtype).transpose(1, 2)
        self.sinks = torch.randn(num_heads, device=device, dtype=layer.dtype)
        self.attend = GpuTreeAttention(device)

    def pack(self, chunks: list[Chunk]) -> PackedRows:
        shapes = Shapes(tuple(1 << power for power in range(9)))
        return pack_rows(chunks, shapes, self.cache.scratch_row)

    def run(self, packed: PackedRows, query: torch.Tensor) -> torch.Tensor:
        seen = TreeAttentionMetadata(packed.num_rows, self.layer.num_groups, query.device)
        seen.fill(packed)
        seen.send()
        layer = self.layer
        sinks = self.sinks if layer.has_sinks else None
        scale = layer.key_size**-0.5
        terms = scale, layer.window, layer.softcap, sinks
        what = seen.rows, seen.items, seen.rows_per_tile
        return self.attend(*what, query, self.keys, self.values, *terms)

    def definition(self) -> torch.Tensor:
        seen = FlexAttentionMetadata(self.cache, self.packed.num_rows, 31)
        seen.fill(self.packed)
        seen.send()
        attend = BlockAttention(seen, self.cache.num_stored_rows, is_compiled=False)
        layer = self.layer
        sinks = self.sinks.float() if layer.has_sinks else None
        terms = layer.key_size**-0.5, layer.window, layer.softcap, sinks
        keys, values = self.keys.nan_to_num().float(), self.values.float()
        return attend(self.query.float(), keys, values, *terms)


@pytest.mark.parametrize("work", WORK, ids=lambda work: str(work)[:30])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_attention_is_what_it_is_defined_as(layer: Layer, work: list[tuple[int, int]]) -> None:
    """Time after time, since what is counted has to be zero again."""
    forward = Forward(layer, work)
    num_rows = sum(chunk.num_rows for chunk in forward.chunks)
    wanted = forward.definition()[:, :num_rows]
    for _ in range(3):
        found = forward.run(forward.packed, forward.query)[:, :num_rows]
        error = (found.float() - wanted).norm() / wanted.norm()
        assert error < 6e-3
    assert not forward.attend._num_ended.any()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_row_gets_what_it_would_get_alone(layer: Layer) -> None:
    """Bit for bit, with its ancestors committed, and nobody beside it."""
    forward = Forward(layer, [(300, 31), (700, 20)])
    found = forward.run(forward.packed, forward.query)
    first_row = 0
    for chunk in forward.chunks:
        tree, first = chunk.tree, chunk.segment.start + chunk.first_column
        assert tree is not None
        for node in range(len(tree)):
            path = tree.path_to(node)[1:]
            before = forward.keys.clone(), forward.values.clone()
            for depth, ancestor in enumerate(path, 1):
                forward.keys[:, :, first + depth] = before[0][:, :, first + ancestor]
                forward.values[:, :, first + depth] = before[1][:, :, first + ancestor]
            column = chunk.first_column + len(path)
            alone = forward.pack([Chunk(chunk.segment, column, [3], DraftTree(3, 0))])
            row = first_row + node
            (own,) = forward.run(alone, forward.query[:, :, row : row + 1])[0]
            assert torch.equal(own, found[0, row])
            forward.keys.copy_(before[0])
            forward.values.copy_(before[1])
        first_row += chunk.num_rows
