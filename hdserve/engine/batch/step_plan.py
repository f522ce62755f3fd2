"""What attention and linear layers need to know of a step that the model does not pass them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.visible_columns import VisibleColumns
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import Segment, align

BoolArray = npt.NDArray[np.bool_]

AttendAll = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        float,
        int | None,
        float | None,
        torch.Tensor | None,
    ],
    torch.Tensor,
]
"""See :class:`~hdserve.engine.attention.flex.BlockAttention`, and for trees
:class:`~hdserve.engine.gpu_kernels.attend.GpuTreeAttention`."""

MultiplyRows = Callable[
    [torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor | None]], list[torch.Tensor]
]
"""See :class:`~hdserve.engine.gpu_kernels.multiply.RowProducts`."""


class AttendListed(Protocol):
    """See :class:`~hdserve.engine.attention.cpu_tree.CpuTreeAttention`."""

    max_rows: int
    layers_at: int
    uses_amx: bool
    scratch_floats: int

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        columns: VisibleColumns,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk whose rows, from ``first_row``, use PyTorch's own attention: to ``num_keys`` cache
    rows, limited by a mask."""

    first_row: int
    chunk: Chunk

    @property
    def num_keys(self) -> int:
        return align(self._num_written)

    @property
    def _num_written(self) -> int:
        return self.chunk.first_column + self.chunk.num_rows

    @property
    def padding(self) -> Segment:
        """Those of the cache rows that hold nothing of the sequence."""
        first = self.chunk.segment.start + self._num_written
        return Segment(first, self.num_keys - self._num_written)

    def visible(self, sliding_window: int | None = None) -> BoolArray:
        """``[num_rows, num_keys]``: what each row sees."""
        visible = _visible(self.chunk, self.num_keys)
        if sliding_window is None:
            return visible
        # A row sees one column for each position up to its own.
        own: npt.NDArray[np.int64] = visible.sum(axis=1) - 1
        key_positions = np.arange(self.num_keys, dtype=np.int64)
        first = self.chunk.first_column
        key_positions[first : first + self.chunk.num_rows] = own
        return visible & (own[:, None] - key_positions[None, :] < sliding_window)


@dataclass(frozen=True, slots=True)
class Listed:
    """Sequences whose rows attend by the compiled kernel, with the columns listed for each row."""

    kernel: AttendListed
    columns: VisibleColumns


@dataclass(slots=True)
class StepPlan:
    """What attention and linear layers need to know of a step.

    Attributes:
        kv_rows: ``[num_rows]`` int64, the cache row each packed row is written to.
        workers: share the work of compiled kernels.
        listed: sequences that the kernel attends for; ``None`` if there are none.
        spans: of the other sequences.
        is_exact: see :class:`~hdserve.engine.batch.shapes.Shapes`.
        attend_all: attends for all sequences in one call; ``None`` if unused.
        multiply_rows: multiplies few rows, on a GPU; ``None`` leaves that to PyTorch.
    """

    cache: KVCache
    kv_rows: torch.Tensor
    workers: Workers
    listed: Listed | None = None
    spans: list[Span] = field(default_factory=list)
    is_exact: bool = False
    attend_all: AttendAll | None = None
    multiply_rows: MultiplyRows | None = None
    _masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)

    def masks(self, sliding_window: int | None, like: torch.Tensor) -> list[torch.Tensor]:
        """One additive mask ``[1, 1, num_rows, num_keys]`` per span, made once per window."""
        found = self._masks.get(sliding_window)
        if found is None:
            found = [_additive(span.visible(sliding_window), like) for span in self.spans]
            self._masks[sliding_window] = found
        return found


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


def _additive(visible: BoolArray, like: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))
    return mask.to(like.device, like.dtype)[None, None]
