"""Measuring what a forward costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hdserve.core import Source
from hdserve.drafting.budget import ForwardCost
from hdserve.engine.batch import Chunk
from hdserve.engine.model_runner import ModelRunner
from hdserve.tree import DraftTree

_NUM_ROUNDS = 5
_CONTEXT_TOKENS = 128


def measure_forward_cost(runner: ModelRunner, max_rows: int) -> ForwardCost:
    """Time forwards of one sequence over growing numbers of rows, on an unused segment.

    Rounds are interleaved and the fastest of each size counts, so that other work on the machine
    does not pass for a property of a size.
    """
    cache, max_model_len = runner.cache, runner.model.max_model_len
    trees = [_tree(count) for count in _row_counts(max_rows) if count <= cache.num_rows]
    largest = max(trees, key=len)
    num_columns = min(
        _CONTEXT_TOKENS, max_model_len - 1 - max(largest.depths), cache.num_rows - len(largest)
    )
    num_columns = max(0, num_columns)
    segment = cache.allocate(num_columns + len(largest))
    assert segment is not None, "the forward's cost is measured while the cache is empty"
    best: dict[int, float] = {}
    try:
        for _ in range(_NUM_ROUNDS):
            for tree in trees:
                started = time.perf_counter()
                runner.forward([Chunk(segment, num_columns, [0], tree)])
                elapsed = time.perf_counter() - started
                best[len(tree)] = min(elapsed, best.get(len(tree), elapsed))
    finally:
        cache.free(segment)
    return ForwardCost(best)


def _tree(num_rows: int) -> DraftTree:
    """A binary tree: shallow, so that it fits into a short context."""
    tree = DraftTree(0, num_rows - 1)
    for node in range(1, num_rows):
        tree.add_node((node - 1) // 2, node % 2, Source.OTHER)
    return tree


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
