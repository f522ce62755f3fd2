"""Caches of which no test reads what is in them."""

from __future__ import annotations

import torch

from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.shape import KVShape


def make_cache(num_rows: int = 640) -> KVCache:
    """The smallest cache of as many rows."""
    shape = KVShape.of_equal_layers(1, 1, 1, 1)
    return KVCache(shape, num_rows, torch.float32, torch.device("cpu"))
