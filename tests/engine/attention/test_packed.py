"""Packed attention equals the definition, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from hdserve.core import Source
from hdserve.engine.attention.cpu_tree import CpuTreeAttention
from hdserve.engine.attention.packed import packed_attention
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import build_batch
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_context import running
from hdserve.engine.batch.step_plan import Span
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree
from tests.engine.caches import equal_layers

NUM_HEADS = 4
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """What an attention function reads of its layer."""

    layer_idx = 1


def make_chunks() -> list[Chunk]:
    """A chunk inside a prompt, one with a tree, and one that decodes plainly."""
    tree = DraftTree(5, 6)
    tree.add_path([6, 7], Source.OTHER)
    tree.add_path([8], Source.OTHER)
    tree.add_path([6, 9], Source.OTHER)
    return [
        Chunk(Segment(0, 64), 7, [1, 2, 3], None),
        Chunk(Segment(96, 64), 20, [4, 5], tree),
        Chunk(Segment(64, 32), 0, [3], DraftTree(3, 0)),
    ]


def random(generator: torch.Generator, dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)


def attend_by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row: ``query [heads, size]`` over ``keys [heads, n, size]``, to ``[heads, value]``."""
    scores = torch.einsum("hd,hnd->hn", query, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.exp()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp()[:, None]
    return torch.einsum("hn,hnv->hv", weights / total, values)


OPTIONS = list(product((4, 2, 1), (None, 0.3), (None, 5), (None, 2.0)))
SINKS = torch.tensor([-3.0, 0.5, 2.0, 40.0])
"""The last takes all of the attention there is."""

KINDS = [  # dtype, key size, value size, tolerance, whether the kernel can read it
    (torch.float64, 8, 6, 1e-6, False),
    (torch.float32, 64, 128, 1e-5, True),
    (torch.float32, 80, 16, 1e-5, True),
    (torch.float32, 16, 20, 1e-5, False),
    (torch.bfloat16, 32, 80, 1e-2, True),
]


SINKS_AND_SHAPES = list(product((False, True), (Shapes(), Shapes((32,), is_exact=True))))


def make_cases() -> Iterator[tuple[Any, ...]]:
    """All options with all kinds; the four combinations of sinks and shapes in turn, shifted so
    that each kind has all four with each of the four of window and softcap."""
    for (number, options), (shift, kind) in product(enumerate(OPTIONS), enumerate(KINDS)):
        turn = number + number // 4 + shift
        yield *options, kind, *SINKS_AND_SHAPES[turn % 4]


@pytest.mark.parametrize(
    ("num_kv_heads", "scaling", "window", "softcap", "kind", "has_sinks", "shapes"),
    list(make_cases()),
    ids=str,
)
def test_packed_attention_is_attention(
    num_kv_heads: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    kind: tuple[torch.dtype, int, int, float, bool],
    has_sinks: bool,
    shapes: Shapes,
) -> None:
    """Each row attends to what is cached of its own sequence, to its ancestors and to itself, with
    grouped heads, windows, bounded scores and sinks as the model wants them; padding changes
    nothing."""
    dtype, key_size, value_size, tolerance, is_readable = kind
    sinks = SINKS if has_sinks else None
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(equal_layers(2, num_kv_heads, key_size, value_size), 160, dtype, CPU)
    cached_keys = random(generator, dtype, 160, num_kv_heads, key_size)
    cached_values = random(generator, dtype, 160, num_kv_heads, value_size)
    by_head = [cached.transpose(0, 1).unsqueeze(0) for cached in (cached_keys, cached_values)]
    cache.write(1, torch.arange(160), *by_head)
    assert CpuTreeAttention.can_read(cache) is is_readable
    kernel = CpuTreeAttention(cache, Workers()) if is_readable else None
    batch = build_batch(make_chunks(), cache, shapes, kernel, Workers())
    num_rows = len(batch.token_ids)
    query = random(generator, dtype, 1, NUM_HEADS, num_rows, key_size)
    key = random(generator, dtype, 1, num_kv_heads, num_rows, key_size)
    value = random(generator, dtype, 1, num_kv_heads, num_rows, value_size)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": window, "softcap": softcap}
    options["s_aux"] = None if sinks is None else sinks.to(dtype)
    with running(batch.plan):
        output, weights = packed_attention(Layer(), query, key, value, None, **options)
    assert weights is None
    assert output.shape == (1, num_rows, NUM_HEADS, value_size)
    assert output.dtype == dtype
    own = batch.plan.kv_rows < 160  # not the scratch row
    cached_keys[batch.plan.kv_rows[own]] = key[0].transpose(0, 1)[own]
    cached_values[batch.plan.kv_rows[own]] = value[0].transpose(0, 1)[own]
    scale = key_size**-0.5 if scaling is None else scaling
    groups = NUM_HEADS // num_kv_heads
    row = 0
    for chunk in make_chunks():
        for seen in Span(row, chunk).visible(window):
            columns = chunk.segment.start + torch.from_numpy(seen).nonzero()[:, 0]
            wanted = attend_by_definition(
                query[0, :, row].double(),
                cached_keys[columns].transpose(0, 1).repeat_interleave(groups, 0).double(),
                cached_values[columns].transpose(0, 1).repeat_interleave(groups, 0).double(),
                scale,
                softcap,
                sinks,
            )
            found = output[0, row].double()
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
            row += 1
