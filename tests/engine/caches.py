"""Shapes of caches, and caches of which no test reads what is in them."""

from __future__ import annotations

import torch

from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.shape import KVShape, LayerShape


def equal_layers(num_layers: int, num_heads: int, key_size: int, value_size: int) -> KVShape:
    """The shape of a model whose layers all store the same, as in most models."""
    return KVShape((LayerShape(num_heads, key_size, value_size),) * num_layers)


def make_cache(num_rows: int = 640) -> KVCache:
    """The smallest cache of as many rows."""
    return KVCache(equal_layers(1, 1, 1, 1), num_rows, torch.float32, torch.device("cpu"))
