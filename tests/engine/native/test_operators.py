"""The operators of C++ give what those of Python give, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hdserve.core import Source
from hdserve.engine.attention.cpu_tree import UNLIMITED, CpuTreeAttention, can_attend_with_amx
from hdserve.engine.attention.packed import attend_numbered
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import build_batch
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_context import running
from hdserve.engine.batch.step_plan import StepPlan
from hdserve.engine.forward.compiled import can_compile
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.registers import HAS_AVX512_BF16
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.engine.linear.prepacked import multiply_prepacked_by_plan
from hdserve.engine.linear.prepacked_weights import prepack
from hdserve.engine.linear.skinny import multiply_rows_by_plan
from hdserve.engine.native.operators import NativeOperators, load_operators
from hdserve.tree import DraftTree
from tests.engine.caches import equal_layers

pytestmark = pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")

CPU = torch.device("cpu")
NUM_KV_HEADS, NUM_HEADS, KEY_SIZE, VALUE_SIZE = 2, 6, 80, 96
BF16_DOT_KEY_SIZE = 96
"""That AVX-512 BF16 can take."""
AMX_SIZES = (64, 64)
"""Of keys and values, that AMX can take."""
SEGMENT_ROWS = 256
NUM_LAYERS = 2
LAYER = torch.tensor(0)

needs_bf16_dot = pytest.mark.skipif(not HAS_AVX512_BF16, reason="the processor has no AVX-512 BF16")
FLOATS = [torch.float32, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture(scope="module")
def operators() -> NativeOperators:
    found = load_operators()
    assert found is not None
    assert load_operators() is found
    return found


def make_cache(
    dtype: torch.dtype, num_sequences: int, key_size: int = KEY_SIZE, value_size: int = VALUE_SIZE
) -> KVCache:
    """Full of the same random numbers each time."""
    shape = equal_layers(NUM_LAYERS, NUM_KV_HEADS, key_size, value_size)
    cache = KVCache(shape, num_sequences * SEGMENT_ROWS, dtype, CPU)
    for layer in range(NUM_LAYERS):
        for stored in cache.read_all(layer):
            stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(layer)))
    return cache


def make_chunks(num_sequences: int, num_tokens: int, seed: int) -> list[Chunk]:
    generator = random.Random(seed)
    chunks = []
    for index in range(num_sequences):
        tree = DraftTree(7, 12)
        for token in range(generator.randrange(12)):
            tree.add_node(generator.randrange(len(tree)), 2 + token, Source.OTHER)
        segment = Segment(index * SEGMENT_ROWS, SEGMENT_ROWS)
        chunks.append(Chunk(segment, generator.randrange(200), [7] * num_tokens, tree))
    return chunks


def make_plan(
    cache: KVCache, chunks: list[Chunk], *, is_exact: bool = False, max_rows: int = 20
) -> StepPlan:
    workers = Workers()
    kernel = CpuTreeAttention(cache, workers, max_rows)
    return build_batch(chunks, cache, Shapes(is_exact=is_exact), kernel, workers).plan


@contextmanager
def natively(operators: NativeOperators, plan: StepPlan) -> Iterator[None]:
    with running(plan), operators.running(plan):
        yield


@DTYPES
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 3), (5,), (1, 0), (1, 40)])
@torch.inference_mode()
def test_layers(
    operators: NativeOperators,
    dtype: torch.dtype,
    has_bias: bool,
    is_exact: bool,
    size: tuple[int, ...],
) -> None:
    """Shared among threads, too, and by the library where there are more rows than 32."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(*size, 512, generator=generator).to(dtype)
    weight = torch.randn(1_036, 512, generator=generator).to(dtype)
    bias = torch.randn(1_036, generator=generator).to(dtype) if has_bias else None
    others = weight.t().contiguous().t()
    plan = make_plan(make_cache(dtype, 1), make_chunks(1, 1, 0), is_exact=is_exact)
    arguments = (rows, weight, others, bias, torch.tensor(32))
    with natively(operators, plan):
        wanted = multiply_rows_by_plan(*arguments)
        found = torch.ops.hdserve.skinny_linear(*arguments)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@needs_bf16_dot
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (2, 3), (5,), (1, 0), (1, 40)])
@torch.inference_mode()
def test_layers_of_prepacked_weights(
    operators: NativeOperators, has_bias: bool, size: tuple[int, ...], num_streams: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, weight, bias = (
        torch.randn(*each, generator=generator).bfloat16()
        for each in ((*size, 512), (1_039, 512), (1_039,))
    )
    arguments = (rows, prepack(weight, num_streams), bias if has_bias else None, len(weight))
    with natively(operators, make_plan(make_cache(torch.bfloat16, 1), make_chunks(1, 1, 0))):
        wanted = multiply_prepacked_by_plan(*arguments)
        found = torch.ops.hdserve.prepacked_linear(*arguments)
    assert torch.equal(found, wanted)


@needs_bf16_dot
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("all_outputs", [(64, 80), (1_039, 64), (77, 1_040, 64), (64, 64, 64)])
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5,), (1, 0), (1, 300)])
@torch.inference_mode()
def test_layers_of_prepacked_weights_together(
    operators: NativeOperators,
    all_outputs: tuple[int, ...],
    size: tuple[int, ...],
    num_streams: int,
) -> None:
    """Each gives what it gives alone, wherever the threads divide their blocks."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(*size, 512, generator=generator).bfloat16()
    weights, biases = [], list[torch.Tensor | None]()
    for index, num_outputs in enumerate(all_outputs):
        weights.append(torch.randn(num_outputs, 512, generator=generator).bfloat16())
        biases.append(torch.randn(num_outputs).bfloat16() if index else None)
    prepacked = [prepack(each, num_streams) for each in weights]
    found = torch.ops.hdserve
    together = found.two_prepacked_linears if len(prepacked) == 2 else found.three_prepacked_linears
    with natively(operators, make_plan(make_cache(torch.bfloat16, 1), make_chunks(1, 1, 0))):
        wanted = [
            multiply_prepacked_by_plan(rows, *each)
            for each in zip(prepacked, biases, all_outputs, strict=True)
        ]
        products = together(rows, *prepacked, *biases, *all_outputs)
    assert all(map(torch.equal, products, wanted))


@pytest.mark.usefixtures("operators")
@torch.inference_mode()
def test_outside_a_step_layers_are_those_of_pytorch() -> None:
    rows, weight = torch.randn(1, 3, 64), torch.randn(20, 64)
    found = torch.ops.hdserve.skinny_linear(rows, weight, weight, None, torch.tensor(32))
    assert torch.equal(found, F.linear(rows, weight))


@pytest.mark.usefixtures("operators")
@torch.inference_mode()
def test_a_step_they_were_not_told_of_is_left_to_python() -> None:
    """That of a compiled model that does without them."""
    generator = torch.Generator().manual_seed(5)
    rows, weight = (torch.randn(*size, generator=generator) for size in ((5, 512), (256, 512)))
    arguments = (rows, weight, torch.zeros_like(weight), None, torch.tensor(32))
    with running(make_plan(make_cache(torch.float32, 1), make_chunks(1, 1, 0))):
        found = torch.ops.hdserve.skinny_linear(*arguments)
        assert torch.equal(found, multiply_rows_by_plan(*arguments))
    assert found.any()


def make_states(
    dtype: torch.dtype, num_rows: int, key_size: int = KEY_SIZE, value_size: int = VALUE_SIZE
) -> tuple[torch.Tensor, ...]:
    """Query, key and value as models give them: the heads of one row lie together."""
    generator = torch.Generator().manual_seed(4)
    sizes = ((NUM_HEADS, key_size), (NUM_KV_HEADS, key_size), (NUM_KV_HEADS, value_size))
    return tuple(
        torch.randn(1, num_rows, *size, generator=generator).to(dtype).transpose(1, 2)
        for size in sizes
    )


SIZES = [(KEY_SIZE, VALUE_SIZE), (BF16_DOT_KEY_SIZE, VALUE_SIZE), AMX_SIZES]
NUM_SEQUENCES_AND_TOKENS = [(1, 1), (1, 4), (7, 2), (3, 60)]
ATTENTION_OPTIONS = [  # scaling, window, softcap, has_sinks
    (None, None, None, False),
    (0.11, 7, None, True),
    (0.2, 40, 30.0, False),
    (1, 40, 30, False),
]


def attention_cases() -> Iterator[tuple[Any, ...]]:
    """Dtypes, sizes, batches and threads in full; the options in turn, shifted so that each cache
    has all four with each number of threads, and each size has them with each batch."""
    for which, at, number, threads in product(range(2), range(3), range(4), (1, 2)):
        options = ATTENTION_OPTIONS[(which + at + number + 2 * threads) % 4]
        yield FLOATS[which], SIZES[at], NUM_SEQUENCES_AND_TOKENS[number], threads, options


@pytest.mark.parametrize(
    ("dtype", "sizes", "sequences", "num_threads", "options"),
    list(attention_cases()),
    indirect=["num_threads"],
    ids=str,
)
@torch.inference_mode()
def test_attention(
    operators: NativeOperators,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    sequences: tuple[int, int],
    num_threads: int,
    options: tuple[float | None, int | None, float | None, bool],
) -> None:
    """What is attended to, and what is in the cache then; sequences of many rows are left to
    Python, but where the processor has AMX and the sizes fit it."""
    num_sequences, num_tokens = sequences
    scaling, window, softcap, has_sinks = options
    chunks = make_chunks(num_sequences, num_tokens, seed=num_sequences)
    num_rows = sum(chunk.num_rows for chunk in chunks)
    states = make_states(dtype, num_rows, *sizes)
    sinks = torch.linspace(-2, 3, NUM_HEADS).to(dtype) if has_sinks else None
    kept: list[Any] = []
    for attend in (attend_numbered, torch.ops.hdserve.packed_attention):
        cache = make_cache(dtype, num_sequences, *sizes)
        with natively(operators, make_plan(cache, chunks)):
            found = [
                attend(*states, torch.tensor(layer), scaling, window, softcap, sinks)
                for layer in range(NUM_LAYERS)
            ]
        kept.append([*found, *(each for layer in range(2) for each in cache.read_all(layer))])
    assert all(map(torch.equal, *kept))


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_attention_leaves_out_rows_that_are_not_read(
    operators: NativeOperators, dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int]
) -> None:
    """Those that are have the same bits; rows are read in any order, and more than once."""
    chunks = make_chunks(5, num_tokens, seed=5)
    num_rows = sum(chunk.num_rows for chunk in chunks)
    cache = make_cache(dtype, len(chunks), *sizes)
    arguments = (*make_states(dtype, num_rows, *sizes), LAYER, None, 9, None, None)
    every_other = [*range(num_rows - 1, -1, -2), 0, 0]
    with natively(operators, make_plan(cache, chunks)):
        wanted = torch.ops.hdserve.packed_attention(*arguments)
        for read in (every_other, [num_rows - 1], [0], [*range(num_rows)], []):
            rows = torch.tensor(read, dtype=torch.int64)
            found = torch.ops.hdserve.packed_attention(*arguments, rows)
            unread = sorted({*range(num_rows)} - {*read})
            assert torch.equal(found[:, read], wanted[:, read])
            assert wanted[:, read].any() or not read
            assert not found[:, unread].any()


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float64, KEY_SIZE), (torch.float32, KEY_SIZE + 8)]
)
@torch.inference_mode()
def test_what_does_not_fit_the_cache_is_refused(
    operators: NativeOperators, dtype: torch.dtype, size: int
) -> None:
    cache = make_cache(torch.float32, 1)
    chunks = make_chunks(1, 1, seed=1)
    query, key, value = make_states(torch.float32, chunks[0].num_rows)
    odd = torch.zeros((*key.shape[:3], size), dtype=dtype)
    with natively(operators, make_plan(cache, chunks)), pytest.raises(RuntimeError, match="size"):
        torch.ops.hdserve.packed_attention(query, odd, value, LAYER, None, None, None, None)


@pytest.mark.skipif(not can_attend_with_amx(), reason="the processor has no AMX")
@torch.inference_mode()
def test_amx_attends_without_python(
    operators: NativeOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(torch.bfloat16, 2, *AMX_SIZES)
    chunks = make_chunks(2, 60, seed=1)
    states = make_states(torch.bfloat16, sum(each.num_rows for each in chunks), *AMX_SIZES)
    arguments = (*states, LAYER, None, None, None, None)
    with natively(operators, make_plan(cache, chunks, max_rows=UNLIMITED)):
        wanted = attend_numbered(*arguments)
        monkeypatch.delattr(CpuTreeAttention, "__call__")
        assert torch.equal(torch.ops.hdserve.packed_attention(*arguments), wanted)


@torch.inference_mode()
def test_each_thread_has_its_own_step(operators: NativeOperators) -> None:
    """An engine in one thread, and a model that is compiled beside it."""
    rows, weight = torch.randn(1, 3, 64), torch.randn(20, 64)
    arguments = (rows, weight, torch.zeros_like(weight), None, torch.tensor(32))
    with natively(operators, make_plan(make_cache(torch.float32, 1), make_chunks(1, 1, 0))):
        with ThreadPoolExecutor(1) as pool:
            outside = pool.submit(torch.ops.hdserve.skinny_linear, *arguments).result()
        inside = torch.ops.hdserve.skinny_linear(*arguments)
    assert not outside.any(), "there is no step in that thread"
    assert inside.any()
