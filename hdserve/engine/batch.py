"""One step's work as flat arrays: which rows go through the model, and what each may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdserve.engine.kv_cache import KVCache, Segment, align
from hdserve.engine.shapes import Shapes
from hdserve.tree import DraftTree

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in one forward: decided tokens, then the drafts that hang on the
    last of them.

    Attributes:
        first_column: tokens already cached.
        token_ids: decided tokens that are not cached yet, at least one.
        tree: drafts after the last of ``token_ids``, its root; ``None`` when the chunk ends inside
            the prompt, where no choice is to be made.
    """

    segment: Segment
    first_column: int
    token_ids: Sequence[int]
    tree: DraftTree | None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + (self.tree.num_draft_tokens if self.tree else 0)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a chunk lies: ``num_rows`` packed rows from ``first_row``, which see the ``num_keys``
    cache rows from ``first_key`` as far as ``visible [num_queries, num_keys]`` says.

    ``num_queries`` is ``num_rows`` padded to the alignment of the shapes; the rows beyond are
    those of whatever comes next in the forward, and what they attend to here is thrown away.
    ``positions [num_rows]`` are those of the rows, of which the first is in ``first_column``.
    """

    first_row: int
    num_rows: int
    num_queries: int
    first_key: int
    num_keys: int
    visible: BoolArray
    first_column: int
    positions: IntArray

    @property
    def query_positions(self) -> IntArray:
        """``[num_queries]``; sliding windows are counted from them."""
        return _repeat_last(self.positions, self.num_queries - self.num_rows)

    @property
    def key_positions(self) -> IntArray:
        """``[num_keys]``."""
        positions = np.arange(self.num_keys, dtype=np.int64)
        positions[self.first_column : self.first_column + self.num_rows] = self.positions
        return positions


@dataclass(slots=True)
class StepPlan:
    """What the attention function needs to know of a step; passed through the model unchanged.

    Attributes:
        kv_rows: ``[num_rows]`` int64, the cache row each packed row is written to.
        attends_in_double: see :class:`~hdserve.engine.shapes.Shapes`.
    """

    cache: KVCache
    kv_rows: torch.Tensor
    spans: list[Span]
    attends_in_double: bool = False
    _masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)

    def masks(self, sliding_window: int | None, like: torch.Tensor) -> list[torch.Tensor]:
        """One additive mask ``[1, 1, num_queries, num_keys]`` per span, made once per window."""
        found = self._masks.get(sliding_window)
        if found is None:
            found = [_additive(_windowed(span, sliding_window), like) for span in self.spans]
            self._masks[sliding_window] = found
        return found


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward: ``token_ids`` and ``position_ids [1, num_rows]``, int64.

    Attributes:
        logit_rows: ``[n]`` int64, the rows whose next token is to be chosen, and padding.
        logit_slices: per chunk its part of ``logit_rows``, in the order of the tree's nodes; empty
            for a chunk without a tree.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    logit_slices: list[slice]
    plan: StepPlan


def build_batch(
    chunks: Sequence[Chunk], cache: KVCache, device: torch.device, shapes: Shapes
) -> ForwardBatch:
    """Pack ``chunks`` into one forward of an allowed shape.

    Padding rows repeat token 0 at position 0, write to the scratch row and are read by nothing.
    """
    num_last = chunks[-1].num_rows
    num_own = sum(chunk.num_rows for chunk in chunks)
    num_rows = shapes.pad_rows(num_own - num_last + align(num_last, shapes.query_alignment))
    token_ids = np.zeros(num_rows, np.int64)
    position_ids = np.zeros(num_rows, np.int64)
    kv_rows = np.full(num_rows, cache.scratch_row, np.int64)
    logit_rows: list[int] = []
    logit_slices: list[slice] = []
    spans: list[Span] = []
    row = 0
    for chunk in chunks:
        rows = slice(row, row + chunk.num_rows)
        positions = _positions(chunk)
        token_ids[rows] = [*chunk.token_ids, *(chunk.tree.token_ids[1:] if chunk.tree else ())]
        position_ids[rows] = positions
        first_kv_row = chunk.segment.start + chunk.first_column
        kv_rows[rows] = np.arange(first_kv_row, first_kv_row + chunk.num_rows)
        spans.append(_span(chunk, row, positions, shapes))
        first_logit = len(logit_rows)
        if chunk.tree is not None:
            logit_rows.extend(range(row + len(chunk.token_ids) - 1, rows.stop))
        logit_slices.append(slice(first_logit, len(logit_rows)))
        row = rows.stop
    if logit_rows:  # the head is a linear layer like the others
        logit_rows += [0] * (shapes.pad_rows(len(logit_rows)) - len(logit_rows))
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(position_ids).to(device).unsqueeze(0),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        logit_slices=logit_slices,
        plan=StepPlan(cache, torch.from_numpy(kv_rows).to(device), spans, shapes.attends_in_double),
    )


def _positions(chunk: Chunk) -> IntArray:
    last = chunk.first_column + len(chunk.token_ids) - 1
    chain = np.arange(chunk.first_column, last + 1, dtype=np.int64)
    if chunk.tree is None or not chunk.tree.num_draft_tokens:
        return chain
    return np.concatenate([chain, last + np.array(chunk.tree.depths[1:], np.int64)])


def _span(chunk: Chunk, first_row: int, positions: IntArray, shapes: Shapes) -> Span:
    num_columns = chunk.first_column + chunk.num_rows
    num_keys = align(num_columns, shapes.key_alignment)
    num_queries = align(chunk.num_rows, shapes.query_alignment)
    return Span(
        first_row=first_row,
        num_rows=chunk.num_rows,
        num_queries=num_queries,
        first_key=chunk.segment.start,
        num_keys=num_keys,
        visible=_repeat_last(_visible(chunk, num_keys), num_queries - chunk.num_rows),
        first_column=chunk.first_column,
        positions=positions,
    )


def _repeat_last(rows: npt.NDArray[Any], num_times: int) -> npt.NDArray[Any]:
    """``rows`` and its last one again."""
    return np.concatenate([rows, *[rows[-1:]] * num_times]) if num_times else rows


def _visible(chunk: Chunk, num_keys: int) -> BoolArray:
    """``[num_rows, num_keys]``: a row sees what is cached, and its own ancestors and itself.

    For two decided tokens ``a b`` and drafts ``b -> c, b -> d, d -> e``::

              cached  a  b  c  d  e
        a       x     x
        b       x     x  x
        c       x     x  x  x
        d       x     x  x     x
        e       x     x  x     x  x
    """
    num_decided, base = len(chunk.token_ids), chunk.first_column
    visible = np.zeros((chunk.num_rows, num_keys), np.bool_)
    visible[:, :base] = True
    visible[:num_decided, base : base + num_decided] = np.tri(num_decided, dtype=np.bool_)
    if chunk.tree is not None:
        for node in range(1, len(chunk.tree)):
            row = num_decided - 1 + node
            visible[row] = visible[num_decided - 1 + chunk.tree.parents[node]]
            visible[row, base + row] = True
    return visible


def _windowed(span: Span, sliding_window: int | None) -> BoolArray:
    if sliding_window is None:
        return span.visible
    distance = span.query_positions[:, None] - span.key_positions[None, :]
    return span.visible & (distance < sliding_window)


def _additive(visible: BoolArray, like: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))
    return mask.to(like.device, like.dtype)[None, None]
