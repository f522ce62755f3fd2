"""Measuring what a forward costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hdserve.drafting.budget import ForwardCost
from hdserve.engine.batch import Chunk
from hdserve.engine.model_runner import ModelRunner
from hdserve.errors import ConfigError
from hdserve.tree import DraftTree

_NUM_ROUNDS = 5
_CONTEXT_TOKENS = 128


def measure_forward_cost(runner: ModelRunner, max_rows: int) -> ForwardCost:
    """Time forwards of one sequence over growing numbers of rows, on an unused segment.

    Rounds are interleaved and the fastest of each size counts, so that other work on the machine
    does not pass for a property of a size.

    Raises:
        ConfigError: the cache is too small to try ``max_rows``.
    """
    num_columns = min(_CONTEXT_TOKENS, runner.model.max_model_len - 1)
    segment = runner.cache.allocate(num_columns + max_rows)
    if segment is None:
        raise ConfigError("the KV cache is too small for one draft tree; raise kv_cache_tokens")
    best: dict[int, float] = {}
    try:
        for _ in range(_NUM_ROUNDS):
            for num_rows in _row_counts(max_rows):
                tree = DraftTree(0, num_rows - 1)
                tree.add_path([0] * (num_rows - 1), tree.sources[0])
                chunk = Chunk(segment, num_columns - tree.max_depth, [0], tree)
                started = time.perf_counter()
                runner.forward([chunk])
                elapsed = time.perf_counter() - started
                best[num_rows] = min(elapsed, best.get(num_rows, elapsed))
    finally:
        runner.cache.free(segment)
    return ForwardCost(best)


def _row_counts(max_rows: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and one less than each from 8 on, where kernels change."""
    size = 1
    while size < max_rows:
        yield size
        if size >= 4:
            yield size + size // 2 - 1
            yield size + size // 2
            yield 2 * size - 1
        elif size == 2:
            yield 3
        size *= 2
    yield max_rows
