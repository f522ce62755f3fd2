"""Making the result of a row independent of what else is in the forward."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hdserve.core import Source
from hdserve.engine.chunk import Chunk
from hdserve.engine.kv_cache import Segment, align
from hdserve.engine.model_runner import ModelRunner
from hdserve.engine.shapes import Shapes, exact_candidates
from hdserve.tree import DraftTree

logger = logging.getLogger(__name__)

_CONTEXT_LENGTHS = (40, 300)
_AFFORDABLE_COST = 1.03
_NUM_COST_ROUNDS = 7


def choose_shapes(runner: ModelRunner, max_rows: int, exact: bool | Literal["auto"]) -> Shapes:
    """The shapes forwards run at: exact ones if they are wanted, or cost next to nothing.

    Says in the log which of them hold.
    """
    plain = runner.shapes
    if exact is False:
        return plain
    found = None
    if exact is True or _cost(runner, exact_candidates(max_rows)) <= _AFFORDABLE_COST:
        found = find_exact_shapes(runner, exact_candidates(max_rows))
        if found is None:
            logger.warning(
                "not exact: no two row counts that fit into the KV cache give equal results here"
            )
    if found is None:
        logger.info("not exact: in rare near-ties drafted and plain output may differ by rounding")
        return plain
    logger.info("exact: forwards run at %s rows", ", ".join(map(str, found.row_counts)))
    return found


def find_exact_shapes(runner: ModelRunner, candidates: Shapes) -> Shapes | None:
    """Try which row counts give bitwise equal rows on this machine, with this model.

    A sequence's last token goes through the model at every candidate count, in the first and in
    the last row, after a short and a long context; counts that give the same logits form a group.
    Where the cache has no room, the long context and then the largest counts are left out.

    Returns:
        ``candidates`` with the row counts of the largest group; ``None`` when no two agree.
    """
    counts = [count for count in candidates.row_counts if _context_lengths(runner, count)]
    groups: list[_Group] = []
    original = runner.shapes
    runner.shapes = candidates
    try:
        for count in counts:
            logits = _logits_at(runner, count)
            if all(torch.equal(first, last) for first, last in logits):
                _add_to_group(groups, count, [first for first, _ in logits])
    finally:
        runner.shapes = original
    largest = max((group.row_counts for group in groups), key=len, default=[])
    if not counts or len(largest) < min(2, len(counts)):
        return None
    return replace(candidates, row_counts=tuple(largest))


@dataclass(frozen=True, slots=True)
class _Group:
    """Row counts that give the same ``logits``, after as many contexts as fitted."""

    logits: list[torch.Tensor]
    row_counts: list[int]


def _add_to_group(groups: list[_Group], count: int, logits: list[torch.Tensor]) -> None:
    """Larger counts may have been tried after fewer contexts than those before."""
    for group in groups:
        if all(map(torch.equal, group.logits, logits)):
            group.row_counts.append(count)
            return
    groups.append(_Group(logits, [count]))


def _context_lengths(runner: ModelRunner, num_rows: int) -> list[int]:
    """After how many tokens a forward of ``num_rows`` can be tried."""
    cache, model = runner.cache, runner.model
    return [
        length
        for length in _CONTEXT_LENGTHS
        if length + num_rows < model.max_model_len
        and align(length + 1) + align(num_rows) <= cache.num_rows
    ]


def _logits_at(runner: ModelRunner, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per context length the logits of one token, in the first and in the last row."""
    cache, model = runner.cache, runner.model
    lengths = _context_lengths(runner, num_rows)
    segments = [cache.allocate(max(lengths) + 1), cache.allocate(num_rows)]
    found = []
    own, other = segments
    assert own is not None
    assert other is not None
    try:
        for length in lengths:
            context = [_token(model.vocab_size, index) for index in range(length)]
            runner.forward([Chunk(own, 0, context, None)])
            tested = Chunk(own, length, [1], DraftTree(1, 0))
            filler = DraftTree(2, num_rows - 2)
            filler.add_path([2] * (num_rows - 2), Source.OTHER)
            neighbour = Chunk(other, 0, [2], filler)
            first, _ = runner.forward([tested, neighbour])
            _, last = runner.forward([neighbour, tested])
            assert first is not None
            assert last is not None
            found.append((first.logits.cpu(), last.logits.cpu()))
    finally:
        for segment in segments:
            if segment is not None:
                cache.free(segment)
    return found


def _token(vocab_size: int, index: int) -> int:
    return (index * 7919 + 13) % vocab_size


def _cost(runner: ModelRunner, shapes: Shapes) -> float:
    """How many times as long a forward of one row takes at ``shapes``, rounds interleaved."""
    num_cached = min(
        _CONTEXT_LENGTHS[-1], runner.cache.num_rows - 1, runner.model.max_model_len - 1
    )
    segment = runner.cache.allocate(num_cached + 1)
    if segment is None:
        return 1.0
    original = runner.shapes
    best = {original: float("inf"), shapes: float("inf")}
    try:
        for _ in range(_NUM_COST_ROUNDS):
            for tried in best:
                runner.shapes = tried
                best[tried] = min(best[tried], _time_one_row(runner, segment, num_cached))
    finally:
        runner.shapes = original
        runner.cache.free(segment)
    return best[shapes] / best[original]


def _time_one_row(runner: ModelRunner, segment: Segment, num_cached: int) -> float:
    """After ``num_cached`` tokens, whatever they are."""
    started = time.perf_counter()
    runner.forward([Chunk(segment, num_cached, [0], DraftTree(0, 0))])
    return time.perf_counter() - started
