"""The compiled attention gives a row the same bits whatever else is in the call."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.nn.functional as F

from hdserve.core import Source
from hdserve.engine.attention.cpu_tree import (
    UNLIMITED,
    CpuTreeAttention,
    can_attend_with_amx,
    max_attended_rows,
)
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.placed_chunks import PlacedChunks
from hdserve.engine.batch.visible_columns import list_columns
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.registers import HAS_AVX512_BF16
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.engine.kv_cache.shape import KVShape, LayerShape
from hdserve.tree import DraftTree
from tests.engine.caches import equal_layers

CPU = torch.device("cpu")
needs_amx = pytest.mark.skipif(not can_attend_with_amx(), reason="the processor has no AMX")
needs_bf16_dot = pytest.mark.skipif(not HAS_AVX512_BF16, reason="the processor has no AVX-512 BF16")
NUM_KV_HEADS, NUM_HEADS = 2, 6
SEGMENT_ROWS = 256
IN_VECTORS, BY_BF16_DOT, WITH_AMX = (80, 96), (96, 80), (64, 128)
LARGE, TOO_LARGE_TO_TRANSPOSE = (256, 64), (288, 48)
"""Numbers of a key and of a value that fit into the one or the other, where there are any."""
SCALE = 0.11

KINDS = pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, IN_VECTORS),
        (torch.bfloat16, IN_VECTORS),
        (torch.bfloat16, BY_BF16_DOT),
        (torch.bfloat16, WITH_AMX),
        (torch.bfloat16, LARGE),
        (torch.bfloat16, TOO_LARGE_TO_TRANSPOSE),
    ],
    ids=str,
)


def make_cache(
    num_sequences: int,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = IN_VECTORS,
) -> KVCache:
    """Full of random numbers."""
    cache = KVCache(equal_layers(1, NUM_KV_HEADS, *sizes), num_sequences * SEGMENT_ROWS, dtype, CPU)
    for stored in cache.read_all(0):
        stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def attend(
    kernel: CpuTreeAttention,
    chunks: list[Chunk],
    query: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[num_rows, num_heads, value_size]`` of ``query [num_rows, num_heads, key_size]``."""
    firsts = [sum(chunk.num_rows for chunk in chunks[:index]) for index in range(len(chunks))]
    columns = list_columns(PlacedChunks.of(zip(firsts, chunks, strict=True)), len(query))
    return kernel(0, query.transpose(0, 1)[None], columns, SCALE, window, None, sinks)[0]


def make_tree(generator: random.Random, num_nodes: int) -> DraftTree:
    tree = DraftTree(1, num_nodes)
    for token in range(num_nodes):
        tree.add_node(generator.randrange(len(tree)), 2 + token, Source.OTHER)
    return tree


@KINDS
@pytest.mark.parametrize("window", [None, 7, 40, 200])
@pytest.mark.parametrize("seed", range(4))
def test_a_draft_gets_the_bits_of_plain_decoding(
    seed: int, window: int | None, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """A node among siblings, in a batch, and the same token decoded by itself, after the path to
    it was moved to where it is committed."""
    generator = random.Random(seed)
    cache = make_cache(5, dtype, sizes)
    kernel = CpuTreeAttention(cache, Workers())
    chunks = [
        Chunk(
            Segment(index * SEGMENT_ROWS, SEGMENT_ROWS),
            generator.randrange(200),
            [7] * generator.randrange(1, 20),
            make_tree(generator, generator.randrange(30)),
        )
        for index in range(5)
    ]
    query = torch.randn(sum(chunk.num_rows for chunk in chunks), NUM_HEADS, sizes[0]).to(dtype)
    together = attend(kernel, chunks, query, window)
    first = 0
    for chunk in chunks:
        tree = chunk.tree
        assert tree is not None
        node = generator.randrange(len(tree))
        root_column = chunk.first_column + len(chunk.token_ids) - 1
        path = tree.path_to(node)[1:]
        start = chunk.segment.start + root_column
        cache.keep([(start + each, start + 1 + depth) for depth, each in enumerate(path)])
        row = first + len(chunk.token_ids) - 1 + node
        alone = Chunk(chunk.segment, root_column + len(path), [7], None)
        assert torch.equal(attend(kernel, [alone], query[row : row + 1], window)[0], together[row])
        first += chunk.num_rows


@KINDS
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_contexts_are_attended_to_by_definition(
    has_sinks: bool, window: int | None, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    cache = make_cache(1, dtype, sizes)
    kernel = CpuTreeAttention(cache, Workers())
    num_cached, num_rows = SEGMENT_ROWS - 40, 5
    chunk = Chunk(Segment(0, SEGMENT_ROWS), num_cached, [1] * num_rows, None)
    query = torch.randn(num_rows, NUM_HEADS, sizes[0]).to(dtype)
    sinks = torch.linspace(-2.0, 4.0, NUM_HEADS) if has_sinks else None
    found = attend(kernel, [chunk], query, window, sinks)
    groups = NUM_HEADS // NUM_KV_HEADS
    keys, values = (each[0].double().repeat_interleave(groups, 0) for each in cache.read_all(0))
    for row in range(num_rows):
        last = num_cached + row
        seen = slice(0 if window is None else last - window + 1, last + 1)
        scores = torch.einsum("hd,hnd->hn", query[row].double(), keys[:, seen]) * SCALE
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
        weights = scores.softmax(dim=-1)[:, : last + 1 - seen.start]
        wanted = torch.einsum("hn,hnv->hv", weights, values[:, seen])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[row].double(), wanted, atol=tolerance, rtol=tolerance)


@KINDS
def test_where_a_prompt_is_cut_changes_no_bit(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    cache = make_cache(1, dtype, sizes)
    kernel = CpuTreeAttention(cache, Workers())
    segment = Segment(0, SEGMENT_ROWS)
    query = torch.randn(200, NUM_HEADS, sizes[0], generator=generator).to(dtype)
    whole = attend(kernel, [Chunk(segment, 0, [1] * 200, None)], query)
    for cut in (1, 16, 99, 128, 199):
        parts = ((0, cut), (cut, 200))
        found = [
            attend(kernel, [Chunk(segment, start, [1] * (stop - start), None)], query[start:stop])
            for start, stop in parts
        ]
        assert torch.equal(torch.cat(found), whole)


@KINDS
@pytest.mark.parametrize("num_cached", [0, 31, 92, 93, 160])
@pytest.mark.parametrize("has_poisoned_key", [False, True])
def test_drafts_that_overflow_spoil_only_what_follows_them(
    has_poisoned_key: bool, num_cached: int, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """Which is told: it is not a number."""
    cache = make_cache(1, dtype, sizes)
    kernel = CpuTreeAttention(cache, Workers())
    tree = make_tree(random.Random(num_cached), 30)
    chunk = Chunk(Segment(0, SEGMENT_ROWS), num_cached, [7], tree)
    query = torch.randn(chunk.num_rows, NUM_HEADS, sizes[0]).to(dtype)
    before = attend(kernel, [chunk], query)
    bad = 3
    stored = cache.read_all(0)[0 if has_poisoned_key else 1]
    for poison in (torch.inf, torch.nan):
        stored[0, :, num_cached + bad] = poison
        after = attend(kernel, [chunk], query)
        for node in range(len(tree)):
            if bad in tree.path_to(node):
                assert not after[node].isfinite().any(), poison
            else:
                assert torch.equal(after[node], before[node]), poison


@pytest.mark.parametrize("sizes", [IN_VECTORS, BY_BF16_DOT, WITH_AMX], ids=str)
def test_queries_of_another_dtype_are_those_numbers(sizes: tuple[int, int]) -> None:
    cache = make_cache(1, torch.bfloat16, sizes)
    kernel = CpuTreeAttention(cache, Workers())
    chunk = Chunk(Segment(0, SEGMENT_ROWS), 50, [7, 8], None)
    query = torch.randn(2, NUM_HEADS, sizes[0]).bfloat16()
    found, wanted = (attend(kernel, [chunk], each) for each in (query.float(), query))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_threads_share_the_work_and_change_nothing(num_threads: int) -> None:
    cache = make_cache(7)
    chunks = [Chunk(Segment(index * SEGMENT_ROWS, 256), 100, [1] * 60, None) for index in range(7)]
    query = torch.randn(7 * 60, NUM_HEADS, 80)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(CpuTreeAttention(cache, Workers()), chunks, query)
        torch.set_num_threads(num_threads)
        kernel = CpuTreeAttention(cache, Workers())
        assert torch.equal(attend(kernel, chunks, query), alone)
        assert len(kernel._rooms) == num_threads  # it did share it
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [8, 64])
def test_few_rows_are_always_attended_for(dtype: torch.dtype, size: int) -> None:
    """Whether the kernel can read such a cache or not."""
    with_amx = size == 64 and dtype == torch.bfloat16 and can_attend_with_amx()
    known = {UNLIMITED} if with_amx else {17, UNLIMITED}
    assert max_attended_rows(equal_layers(3, 2, size, size), dtype) in known


def test_a_kernel_that_gains_with_many_rows_attends_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where PyTorch is faster with few."""

    def attend_slowly(query: torch.Tensor, *_: torch.Tensor) -> None:
        time.sleep(0.3 if query.shape[2] > 200 else 0.0)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_slowly)
    assert max_attended_rows(equal_layers(1, 2, 64, 64), torch.float32) == UNLIMITED


@needs_amx
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("num_cached", [0, 1, 31, 32, 95, 190])
def test_amx_attends_as_vectors_do(num_cached: int, window: int | None) -> None:
    """But for the rounding of weights to bfloat16; drafts deeper than a tail are right, too."""
    generator = random.Random(num_cached)
    cache = make_cache(1, torch.bfloat16, WITH_AMX)
    tree = DraftTree(1, 60)
    for token in range(20):
        tree.add_node(generator.randrange(len(tree)), 2 + token, Source.OTHER)
    tree.add_path([*range(100, 140)], Source.OTHER)
    chunk = Chunk(Segment(0, SEGMENT_ROWS), num_cached, [7, 8, 9], tree)
    query = torch.randn(chunk.num_rows, NUM_HEADS, WITH_AMX[0]).bfloat16()
    with_amx = CpuTreeAttention(cache, Workers())
    by_vectors = CpuTreeAttention(cache, Workers(), uses_amx=False, uses_bf16_dot=False)
    assert with_amx.uses_amx
    assert with_amx.max_depth < max(tree.depths)
    found, wanted = (attend(kernel, [chunk], query, window) for kernel in (with_amx, by_vectors))
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=0)
    assert (found - wanted).abs().mean() < 2e-3


@needs_bf16_dot
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("num_cached", [0, 1, 31, 32, 95, 190])
def test_bf16_dot_attends_as_vectors_do(num_cached: int, window: int | None) -> None:
    """But for the rounding of weights to bfloat16, of layers whose keys come in pairs."""
    generator = random.Random(num_cached)
    layers = (LayerShape(NUM_KV_HEADS, 96, 80), LayerShape(NUM_KV_HEADS, 80, 96))
    cache = KVCache(KVShape(layers), SEGMENT_ROWS, torch.bfloat16, CPU)
    for layer in range(len(layers)):
        for stored in cache.read_all(layer):
            stored.copy_(torch.randn(stored.shape))
    chunk = Chunk(Segment(0, SEGMENT_ROWS), num_cached, [7, 8, 9], make_tree(generator, 20))
    columns = list_columns(PlacedChunks.of([(0, chunk)]), chunk.num_rows)
    are_equal = []
    for layer, shape in enumerate(layers):
        query = torch.randn(1, NUM_HEADS, chunk.num_rows, shape.key_size).bfloat16()
        found, wanted = (
            CpuTreeAttention(cache, Workers(), uses_amx=False, uses_bf16_dot=uses_bf16_dot)(
                layer, query, columns, SCALE, window, None
            )
            for uses_bf16_dot in (True, False)
        )
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=0)
        assert (found - wanted).abs().mean() < 2e-3
        are_equal.append(torch.equal(found, wanted))
    assert are_equal == [False, True]
