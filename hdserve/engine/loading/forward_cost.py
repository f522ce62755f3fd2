"""Measuring what a forward costs on this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hdserve.core import Source
from hdserve.databases.recycled import NUM_TOP
from hdserve.drafting.batch_cost import BatchCost, ForwardCost
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.forward.model_runner import ModelRunner, rounded
from hdserve.engine.forward.node_outputs import TopTokens
from hdserve.engine.kv_cache.segments import align
from hdserve.tree import DraftTree

_NUM_COLUMNS = 128
_NUM_MANY_COLUMNS = 1024
"""Cached tokens of each sequence, if there is room."""

_NUM_ROUNDS = 4
_MAX_ROUND_S = 1.0
"""The time limit of the additional forwards of a round, relative to one short sequence."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A forward to be timed: ``num_sequences`` trees of ``num_rows`` nodes each, after
    ``num_columns`` tokens."""

    num_sequences: int
    num_rows: int
    num_columns: int

    @property
    def num_rows_together(self) -> int:
        return self.num_sequences * self.num_rows


def num_rows_to_measure(max_rows: int, max_num_sequences: int) -> int:
    """How many cache rows :func:`measure_forward_cost` needs to measure everything."""
    return max(
        max_num_sequences * align(_NUM_COLUMNS + max_rows), align(_NUM_MANY_COLUMNS + max_rows)
    )


def measure_forward_cost(
    runner: ModelRunner, max_rows: int, max_num_sequences: int = 1
) -> BatchCost:
    """Time forwards of growing trees of growing numbers of sequences, and of one long sequence, on
    an unused cache.

    Rounds go through all sizes, alternately up and down, and the fastest time of each size counts:
    so neither other work on the machine, nor a previous forward that filled the processor's caches,
    is taken for a property of a size.  Left out are forwards that do not fit into the cache, and,
    the most rows first, those of several or long sequences that would take too long; further rows
    of several sequences are then assumed to cost what they cost one sequence (docs/adr/0029).

    Args:
        max_rows: of one sequence.
    """
    num_columns = _num_columns(runner, max_rows, _NUM_COLUMNS)
    num_many = _num_columns(runner, max_rows, _NUM_MANY_COLUMNS)
    needed = [_Point(1, num_rows, num_columns) for num_rows in _row_counts(max_rows)]
    others = _other_points(max_rows, max_num_sequences, num_columns, num_many)
    seconds = _time_forwards(runner, needed, list(others))
    curves: dict[int, dict[int, float]] = defaultdict(dict)
    for point, elapsed in seconds.items():
        if point.num_columns == num_columns:
            curves[point.num_sequences][point.num_rows_together] = elapsed
    assert 1 in curves, "the forward's cost is measured while the cache is empty"
    alone = ForwardCost(curves[1])
    return BatchCost(
        {number: ForwardCost(points).going_on_as(alone) for number, points in curves.items()},
        num_columns=num_columns,
        column_cost=_column_cost(seconds, num_columns),
        reading_share=_time_reading(runner, max_rows) / float(alone(max_rows)),
    )


def _time_forwards(
    runner: ModelRunner, needed: Sequence[_Point], others: Sequence[_Point]
) -> dict[_Point, float]:
    """The fastest time of each in seconds, if there was room, and time for ``others``."""
    _write_rows(runner, needed)
    best: dict[_Point, float] = {}

    def time_all(points: Iterable[_Point]) -> None:
        for point in points:
            elapsed = _time_forward(runner, point)
            if elapsed is not None:
                best[point] = min(elapsed, best.get(point, elapsed))

    time_all(needed)
    rest = [*reversed(_in_time(best, others))]
    _write_rows(runner, [*needed, *rest])
    time_all(rest)
    points = [*needed, *rest]
    for _ in range(_NUM_ROUNDS - 1):
        points.reverse()
        time_all(points)
    return best


def _in_time(seconds: Mapping[_Point, float], others: Sequence[_Point]) -> list[_Point]:
    """Those of ``others`` that fit into the time of a round, judged by what one sequence took, the
    fewest rows first; returned in their order."""
    alone = ForwardCost({point.num_rows: elapsed for point, elapsed in seconds.items()})
    left_s, found = _MAX_ROUND_S, set[_Point]()
    for point in sorted(others, key=lambda each: each.num_rows_together):
        left_s -= float(alone(point.num_rows_together))
        if left_s < 0.0:
            break
        found.add(point)
    return [point for point in others if point in found]


def _write_rows(runner: ModelRunner, points: Sequence[_Point]) -> None:
    """Write to the cache.  Pages never written to all map to the same memory, which would be read
    too fast."""
    num_rows = max(
        point.num_sequences * align(point.num_columns + point.num_rows) for point in points
    )
    segment = runner.cache.rows.allocate(min(num_rows, runner.cache.num_rows))
    assert segment is not None, "the forward's cost is measured while the cache is empty"
    runner.cache.clear(segment)
    runner.cache.rows.free(segment)


def _column_cost(seconds: Mapping[_Point, float], num_columns: int) -> ForwardCost | None:
    """The cost of each column beyond ``num_columns``, by the number of rows of its sequence, if a
    long one was measured with all numbers of rows."""
    found: dict[int, float] = {}
    for point, elapsed in seconds.items():
        num_more = point.num_columns - num_columns
        if num_more:
            short_s = seconds[replace(point, num_columns=num_columns)]
            found[point.num_rows] = max(0.0, elapsed - short_s) / num_more
    most = max(point.num_rows for point in seconds if point.num_sequences == 1)
    return ForwardCost(found) if most in found else None


def _time_reading(runner: ModelRunner, num_rows: int) -> float:
    """Seconds to find the likeliest tokens of ``num_rows`` rows, without the forward."""
    if runner.finds_tokens:
        return 0.0
    model = runner.model
    logits = rounded(torch.randn((num_rows, model.vocab_size)).to(model.device, model.dtype))
    best = float("inf")
    for _ in range(_NUM_ROUNDS):
        started = time.perf_counter()
        TopTokens(logits, num_rows)(min(NUM_TOP, model.vocab_size))
        best = min(best, time.perf_counter() - started)
    return best


def _num_columns(runner: ModelRunner, max_rows: int, wanted: int) -> int:
    """How many cached tokens each sequence has: ``wanted``, or less if the context or the cache is
    smaller."""
    deepest = max(binary_tree(max_rows).depths)
    rows_left = runner.cache.num_rows - max_rows
    return max(0, min(wanted, runner.model.max_model_len - 1 - deepest, rows_left))


def _other_points(
    max_rows: int, max_num_sequences: int, num_columns: int, num_many_columns: int
) -> Iterator[_Point]:
    """A long sequence and several short ones, at fewer row counts than a single short one."""
    few = [*_doubled(max_rows), max_rows]
    if num_many_columns > num_columns:
        for num_rows in few:
            yield _Point(1, num_rows, num_many_columns)
    num_sequences = 2
    while num_sequences < 2 * max_num_sequences and max_num_sequences > 1:
        for num_rows in few:
            yield _Point(min(num_sequences, max_num_sequences), num_rows, num_columns)
        num_sequences *= 2


def _doubled(stop: int) -> Iterator[int]:
    number = 1
    while number < stop:
        yield number
        number *= 2


def _time_forward(runner: ModelRunner, point: _Point) -> float | None:
    """Seconds, or ``None`` if the cache is too small."""
    cache, num_columns = runner.cache, point.num_columns
    allocated = [
        cache.rows.allocate(num_columns + point.num_rows) for _ in range(point.num_sequences)
    ]
    segments = [segment for segment in allocated if segment is not None]
    try:
        if len(segments) < point.num_sequences:
            return None
        tree = binary_tree(point.num_rows)
        chunks = [Chunk(segment, num_columns, [0], tree) for segment in segments]
        started = time.perf_counter()
        runner.forward(chunks)
        return time.perf_counter() - started
    finally:
        for segment in segments:
            cache.rows.free(segment)


def binary_tree(num_rows: int) -> DraftTree:
    """A tree of ``num_rows`` nodes, shallow, so that it fits into a short context."""
    tree = DraftTree(0, num_rows - 1)
    for node in range(1, num_rows):
        tree.add_node((node - 1) // 2, node % 2, Source.OTHER)
    return tree


def _row_counts(max_rows: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ..., one less than each from 6 on, and one more than 16, 32, ...:
    where kernels change."""
    doubled = [*_doubled(max_rows)]
    counts = {max_rows, *doubled, *(count + count // 2 for count in doubled)}
    counts |= {count - 1 for count in counts if count >= 6}
    counts |= {count + 1 for count in doubled if count >= 16}
    return sorted(count for count in counts if count <= max_rows)
