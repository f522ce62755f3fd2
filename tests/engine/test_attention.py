"""Packed attention equals the definition, row by row."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from hdserve.core import Source
from hdserve.engine.attention import attending, packed_attention, register_attention
from hdserve.engine.batch import Chunk, build_batch
from hdserve.engine.kv_cache import KVCache, KVShape, Segment
from hdserve.engine.shapes import Shapes
from hdserve.tree import DraftTree

NUM_HEADS, HEAD_SIZE, VALUE_SIZE = 4, 8, 6
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


def random(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def attend_by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """One row: ``query [heads, size]`` over ``keys [heads, n, size]``, to ``[heads, value]``."""
    scores = torch.einsum("hd,hnd->hn", query, keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("hn,hnv->hv", scores.softmax(dim=-1), values)


OPTIONS = list(product((4, 2, 1), (None, 0.3), (None, 5), (None, 2.0)))


@pytest.mark.parametrize(("num_kv_heads", "scaling", "window", "softcap"), OPTIONS)
@pytest.mark.parametrize("shapes", [Shapes(), Shapes((32,), 4, 64)])
def test_packed_attention_is_attention(
    num_kv_heads: int, scaling: float | None, window: int | None, softcap: float | None, shapes: Any
) -> None:
    """Each row attends to what is cached of its own sequence, to its ancestors and to itself, with
    grouped heads, windows and bounded scores as the model wants them; padding changes nothing."""
    generator = torch.Generator().manual_seed(0)
    shape = KVShape(2, num_kv_heads, HEAD_SIZE, VALUE_SIZE)
    cache = KVCache(shape, 160, torch.float64, CPU)
    rows = torch.arange(160)
    cached_keys = random(generator, 160, num_kv_heads, HEAD_SIZE)
    cached_values = random(generator, 160, num_kv_heads, VALUE_SIZE)
    by_head = [cached.transpose(0, 1).unsqueeze(0) for cached in (cached_keys, cached_values)]
    cache.write(1, rows, *by_head)
    batch = build_batch(make_chunks(), cache, CPU, shapes)
    num_rows = batch.token_ids.shape[1]
    query = random(generator, 1, NUM_HEADS, num_rows, HEAD_SIZE)
    key = random(generator, 1, num_kv_heads, num_rows, HEAD_SIZE)
    value = random(generator, 1, num_kv_heads, num_rows, VALUE_SIZE)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": window, "softcap": softcap}
    with attending(batch.plan):
        output, weights = packed_attention(Layer(), query, key, value, None, **options)
    assert weights is None
    assert output.shape == (1, num_rows, NUM_HEADS, VALUE_SIZE)
    own = batch.plan.kv_rows < 160  # not the scratch row
    cached_keys[batch.plan.kv_rows[own]] = key[0].transpose(0, 1)[own]
    cached_values[batch.plan.kv_rows[own]] = value[0].transpose(0, 1)[own]
    scale = HEAD_SIZE**-0.5 if scaling is None else scaling
    groups = NUM_HEADS // num_kv_heads
    for span in batch.plan.spans:
        for index in range(span.num_rows):
            near = span.query_positions[index] - span.key_positions
            seen = span.visible[index] & (near < (window or 10**6))
            columns = span.first_key + torch.from_numpy(seen).nonzero()[:, 0]
            wanted = attend_by_definition(
                query[0, :, span.first_row + index],
                cached_keys[columns].transpose(0, 1).repeat_interleave(groups, 0),
                cached_values[columns].transpose(0, 1).repeat_interleave(groups, 0),
                scale,
                softcap,
            )
            found = output[0, span.first_row + index]
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_registering_again_is_harmless() -> None:
    """Several models may be loaded in one process."""
    register_attention()
    register_attention()
