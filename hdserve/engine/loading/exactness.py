"""Making the result of a row independent of what else is in the forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from transformers.pytorch_utils import Conv1D

from hdserve.core import Source
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.shapes import Shapes, exact_candidates
from hdserve.engine.forward.compiled import fits_tiles
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.kv_cache.segments import Segment, align
from hdserve.engine.linear.layers import are_rows_independent
from hdserve.engine.loading.model_check import trial_text
from hdserve.errors import ConfigError
from hdserve.tree import DraftTree

logger = logging.getLogger(__name__)

_CONTEXT_LENGTHS = (40, 300)
_LAYERS = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)
"""Have no matrices in stacks, though their weights may have more dimensions than two: those of
linear layers if they are prepacked."""
_TRIED_COUNTS = (1, 2, 3, 5, 8, 17, 64)

_AFFORDABLE_COST = 1.03
_NUM_COST_ROUNDS = 7
_NUM_COST_TRIALS = 3
"""Shapes count as too slow only if each of this many trials says so: on a busy machine a single
trial may, though forwards take the same time."""

_MAX_COST_S = 2.0
"""How long a trial takes before it starts no further round: large models are slow, and their times
vary less."""

_CHUNKS_TOKENS = (64, 256)
"""The lengths of the prompt chunks that are timed.  A long chunk may lose what a short one gains
where threads share it."""


def choose_shapes(runner: ModelRunner, max_rows: int, exact: bool | Literal["auto"]) -> Shapes:
    """The shapes at which forwards of up to ``max_rows`` run: exact ones if they are required or
    cost next to nothing.

    The log says which were chosen.

    Raises:
        ConfigError: exact ones are required, and there are none, or none for this kind of model.
    """
    if exact is False:
        return runner.shapes
    for candidates in _candidates(runner, max_rows):
        if exact == "auto" and not _is_affordable(runner, candidates):
            break  # the remaining candidates are slower
        found = find_exact_shapes(runner, candidates)
        if found is not None and found.pads(max_rows):
            counts = ", ".join(map(str, found.row_counts)) or "any number of"
            logger.info("exact: forwards run at %s rows", counts)
            return found
    if exact is True:
        raise ConfigError(
            f"answers cannot be exact: {_obstacle(runner, max_rows)}; with engine.exact: auto "
            "drafted and plain output may differ by rounding in rare near-ties"
        )
    logger.info("not exact: in rare near-ties drafted and plain output may differ by rounding")
    return runner.shapes


def has_experts(module: torch.nn.Module) -> bool:
    """Whether what a language model reads text with has matrices in stacks: a mixture of experts,
    each of which multiplies those rows that it is chosen for."""
    others = {
        parameter
        for layer in module.modules()
        if isinstance(layer, _LAYERS)
        for parameter in layer.parameters(recurse=False)
    }
    decoder = cast("Any", module).get_decoder()
    return any(
        parameter.dim() > 2 and len(parameter) > 1
        for parameter in decoder.parameters()
        if parameter not in others
    )


def _obstacle(runner: ModelRunner, max_rows: int) -> str:
    module = runner.model.module
    if has_experts(module):
        return f"{type(module).__name__} has experts, each with a number of rows of its own"
    return f"no row counts up to {max_rows} that fit into the KV cache give equal results here"


def _candidates(runner: ModelRunner, max_rows: int) -> Iterator[Shapes]:
    """The shapes to try, cheapest first; none for a mixture of experts, whose products no kernel of
    ours computes, and have as many rows as are sent to an expert, whatever the shape."""
    module = runner.model.module
    if has_experts(module):
        return
    if not any(isinstance(layer, Conv1D) for layer in module.modules()):  # GPT-2's, not ours either
        if runner.attends_with_amx and fits_tiles(module):
            yield replace(runner.shapes, is_exact=True)
        if _calls_kernels(runner):
            yield Shapes(is_exact=True)
    yield exact_candidates(max_rows)


def _calls_kernels(runner: ModelRunner) -> bool:
    """Whether our kernel computes all products of exact forwards."""
    if runner.compiled is not None:
        return runner.compiled.is_native
    return are_rows_independent(runner.model.module)


@contextmanager
def _at(runner: ModelRunner, shapes: Shapes) -> Iterator[None]:
    """Run forwards at other shapes within the context."""
    original = runner.shapes
    runner.shapes = shapes
    try:
        yield
    finally:
        runner.shapes = original


def find_exact_shapes(runner: ModelRunner, candidates: Shapes) -> Shapes | None:
    """Try which row counts give bitwise equal rows on this machine, with this model.

    A sequence's last token goes through the model at every candidate count, in the first and in
    the last row, after a short and a long context; counts that give the same logits form a group.
    If the cache is too small, the long context is left out, then the largest counts.  Candidates
    that allow any count are tried at several counts, which must all agree; then the last chunk of
    a context has that many tokens, too.

    Returns:
        ``candidates`` with the row counts of the largest group; ``None`` when no two agree.
    """
    allows_any = not candidates.row_counts
    tried = _TRIED_COUNTS if allows_any else candidates.row_counts
    counts = [count for count in tried if _context_lengths(runner, count)]
    groups: list[_Group] = []
    for count in counts:
        with _at(runner, candidates):
            logits = _logits_at(runner, count, num_last=count if allows_any else 0)
        are_equal = all(torch.equal(first, last) for first, last in logits)
        if are_equal:
            _add_to_group(groups, count, [first for first, _ in logits])
        if allows_any and not (are_equal and len(groups) == 1):
            return None
    if allows_any:
        return candidates if counts else None
    largest = max((group.row_counts for group in groups), key=len, default=[])
    if not counts or len(largest) < min(2, len(counts)):
        return None
    return replace(candidates, row_counts=tuple(largest))


@dataclass(frozen=True, slots=True)
class _Group:
    """Row counts that give the same ``logits``, one entry for each context that fitted."""

    logits: list[torch.Tensor]
    row_counts: list[int]


def _add_to_group(groups: list[_Group], count: int, logits: list[torch.Tensor]) -> None:
    """Add a row count to those that give the same logits.  Larger counts may have been tried after
    fewer contexts than earlier ones."""
    for group in groups:
        if all(map(torch.equal, group.logits, logits)):
            group.row_counts.append(count)
            return
    groups.append(_Group(logits, [count]))


def _context_lengths(runner: ModelRunner, num_rows: int) -> list[int]:
    """The lengths of context after which a forward of ``num_rows`` can be tried."""
    cache, model = runner.cache, runner.model
    return [
        length
        for length in _CONTEXT_LENGTHS
        if length + num_rows < model.max_model_len
        and align(length + 1) + align(num_rows) <= cache.num_rows
    ]


def _logits_at(
    runner: ModelRunner, num_rows: int, num_last: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each context length the logits of one token, in the first and in the last row.

    Args:
        num_last: size of the last chunk, in which the context's last tokens go through the model.
    """
    cache = runner.cache
    lengths = _context_lengths(runner, num_rows)
    if not lengths:
        return []
    own, other = cache.rows.allocate(max(lengths) + 1), cache.rows.allocate(num_rows)
    assert own is not None, "the lengths leave room"
    assert other is not None, "the lengths leave room"
    found = []
    try:
        for length in lengths:
            _prefill(runner, own, length, length - num_last % length)
            tested = Chunk(own, length, [1], DraftTree(1, 0))
            neighbours = _neighbours(other, num_rows - 1, runner.max_depth)
            first = runner.forward([tested, *neighbours])[0]
            last = runner.forward([*neighbours, tested])[-1]
            assert first is not None
            assert last is not None
            found.append((first.logits.cpu(), last.logits.cpu()))
    finally:
        cache.rows.free(own)
        cache.rows.free(other)
    return found


def _prefill(runner: ModelRunner, segment: Segment, length: int, cut: int) -> None:
    """Put a prompt of ``length`` tokens into the cache, those from ``cut`` on as a second chunk."""
    context = trial_text(length, runner.model.vocab_size)
    for first, stop in ((0, cut), (cut, length)):
        if first < stop:
            runner.forward([Chunk(segment, first, context[first:stop], None)])


def _neighbours(segment: Segment, num_rows: int, max_depth: int) -> list[Chunk]:
    """One sequence with a tree of ``num_rows`` nodes, at most ``max_depth`` deep; or nothing."""
    if not num_rows:
        return []
    tree = DraftTree(2, num_rows - 1)
    for branch, first in enumerate(range(0, num_rows - 1, max_depth)):
        length = min(max_depth, num_rows - 1 - first)
        tree.add_path([2 + branch, *[2] * (length - 1)], Source.OTHER)
    return [Chunk(segment, 0, [2], tree)]


def _is_affordable(runner: ModelRunner, shapes: Shapes) -> bool:
    """Whether forwards at ``shapes`` take about as long as the current ones, for one row after some
    context and for chunks of a prompt."""
    are_same_rows = replace(runner.shapes, is_exact=True) == shapes
    if are_same_rows and runner.attends_with_amx:
        return True  # the forwards are the same
    cached = min(_CONTEXT_LENGTHS[-1], runner.cache.num_rows - 1, runner.model.max_model_len - 1)
    longest = min(runner.cache.num_rows, runner.model.max_model_len)
    lengths = {min(number, longest) for number in _CHUNKS_TOKENS}
    segment = runner.cache.rows.allocate(max(cached + 1, *lengths))
    if segment is None:
        return True
    tried = [Chunk(segment, 0, [0] * length, None) for length in sorted(lengths)]
    is_native = runner.compiled is not None and runner.compiled.is_native
    if not (are_same_rows and is_native):  # else forwards of one row are the same
        tried.insert(0, Chunk(segment, cached, [0], DraftTree(0, 0)))
    try:
        return all(
            any(_cost(runner, shapes, each) <= _AFFORDABLE_COST for _ in range(_NUM_COST_TRIALS))
            for each in tried
        )
    finally:
        runner.cache.rows.free(segment)


def _cost(runner: ModelRunner, shapes: Shapes, chunk: Chunk) -> float:
    """A forward's time at ``shapes`` relative to the current ones, rounds interleaved."""
    best = {runner.shapes: float("inf"), shapes: float("inf")}
    runner.forward([chunk])
    until_s = time.monotonic() + _MAX_COST_S
    for number in range(_NUM_COST_ROUNDS):
        if number and time.monotonic() > until_s:
            break
        for tried in best:
            with _at(runner, tried):
                started = time.perf_counter()
                runner.forward([chunk])
                best[tried] = min(best[tried], time.perf_counter() - started)
    return best[shapes] / best[runner.shapes]
