"""Measuring what a forward costs on this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hdserve.core import Source
from hdserve.databases.recycled import NUM_TOP
from hdserve.drafting.budget import BatchCost, ForwardCost
from hdserve.engine.chunk import Chunk
from hdserve.engine.model_runner import ModelRunner, TopTokens
from hdserve.tree import DraftTree

MEASURED_COLUMNS = 128
"""Tokens each sequence has cached, where there is room."""

_NUM_ROUNDS = 4
_MAX_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class _Point:
    """A forward to be timed: ``num_sequences`` trees of ``num_rows`` nodes each."""

    num_sequences: int
    num_rows: int

    @property
    def num_rows_together(self) -> int:
        return self.num_sequences * self.num_rows


def measure_forward_cost(
    runner: ModelRunner, max_rows: int, max_num_sequences: int = 1
) -> BatchCost:
    """Time forwards of growing trees of growing numbers of sequences, on an unused cache.

    Rounds are interleaved and the fastest of each size counts, so that other work on the machine
    does not pass for a property of a size.  What does not fit into the cache, or would take too
    long to measure with several sequences, is left to extrapolation.

    Args:
        max_rows: of one sequence.
    """
    num_columns = _num_columns(runner, max_rows)
    best: dict[_Point, float] = {}
    points = list(_points(max_rows, max_num_sequences))
    started = time.perf_counter()
    for _ in range(_NUM_ROUNDS):
        for point in points:
            if point.num_sequences > 1 and time.perf_counter() - started > _MAX_SECONDS:
                continue
            elapsed = _time_forward(runner, point, num_columns)
            if elapsed is not None:
                best[point] = min(elapsed, best.get(point, elapsed))
    curves: dict[int, dict[int, float]] = defaultdict(dict)
    for point, elapsed in best.items():
        curves[point.num_sequences][point.num_rows_together] = elapsed
    assert 1 in curves, "the forward's cost is measured while the cache is empty"
    reading_share = _time_reading(runner, max_rows) / curves[1][max_rows]
    return BatchCost(
        {number: ForwardCost(points) for number, points in curves.items()}, reading_share
    )


def _time_reading(runner: ModelRunner, num_rows: int) -> float:
    """Seconds to find the likeliest tokens of ``num_rows`` rows."""
    logits = torch.rand((num_rows, runner.model.vocab_size)).to(runner.model.device)
    best = float("inf")
    for _ in range(_NUM_ROUNDS):
        started = time.perf_counter()
        TopTokens(logits)(min(NUM_TOP, runner.model.vocab_size))
        best = min(best, time.perf_counter() - started)
    return best


def _num_columns(runner: ModelRunner, max_rows: int) -> int:
    """Tokens each sequence has cached: as many as the context and the cache leave."""
    deepest = max(_tree(max_rows).depths)
    rows_left = runner.cache.num_rows - max_rows
    return max(0, min(MEASURED_COLUMNS, runner.model.max_model_len - 1 - deepest, rows_left))


def _points(max_rows: int, max_num_sequences: int) -> Iterator[_Point]:
    """One sequence at every row count where a kernel may change, several at fewer."""
    for num_rows in _row_counts(max_rows):
        yield _Point(1, num_rows)
    num_sequences = 2
    while num_sequences < 2 * max_num_sequences and max_num_sequences > 1:
        for num_rows in (*_doubled(max_rows), max_rows):
            yield _Point(min(num_sequences, max_num_sequences), num_rows)
        num_sequences *= 2


def _doubled(stop: int) -> Iterator[int]:
    number = 1
    while number < stop:
        yield number
        number *= 2


def _time_forward(runner: ModelRunner, point: _Point, num_columns: int) -> float | None:
    """Seconds, or ``None`` where the cache is too small."""
    cache = runner.cache
    allocated = [cache.allocate(num_columns + point.num_rows) for _ in range(point.num_sequences)]
    segments = [segment for segment in allocated if segment is not None]
    try:
        if len(segments) < point.num_sequences:
            return None
        tree = _tree(point.num_rows)
        chunks = [Chunk(segment, num_columns, [0], tree) for segment in segments]
        started = time.perf_counter()
        runner.forward(chunks)
        return time.perf_counter() - started
    finally:
        for segment in segments:
            cache.free(segment)


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
