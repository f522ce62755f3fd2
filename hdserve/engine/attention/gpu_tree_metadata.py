"""What the rows of a forward of draft trees see, as
:mod:`~hdserve.engine.gpu_kernels.attend` reads it."""

from __future__ import annotations

import torch

from hdserve.engine.batch.cpu_gpu_buffer import CpuGpuBuffer
from hdserve.engine.batch.packed_rows import PackedRows
from hdserve.engine.kernels.splits import (
    ITEM_FIELDS,
    MAX_GROUPS,
    MAX_ROWS,
    NUM_ENTRIES,
    QUERIES,
    ROW_FIELDS,
    describe_tails,
    list_items,
)


class TreeAttentionMetadata:
    """What rows see, filled for each step and sent to the device; its addresses never change.

    Args:
        num_rows: of the forwards, padding included.
        num_groups: heads that share keys, in the layer with the most.

    Attributes:
        rows_per_tile: see :func:`~hdserve.engine.kernels.splits.list_items`.
        rows, items: int32 ``[num_rows, ROW_FIELDS]`` and ``[NUM_ENTRIES, ITEM_FIELDS]``, see
            :mod:`hdserve.engine.kernels.splits`.
    """

    def __init__(self, num_rows: int, num_groups: int, device: torch.device) -> None:
        assert num_rows <= MAX_ROWS, "there are too many rows"
        groups_together = min(MAX_GROUPS, 1 << (num_groups - 1).bit_length())
        self.rows_per_tile = QUERIES // groups_together
        self._rows = CpuGpuBuffer((num_rows, ROW_FIELDS), torch.int32, device)
        self._items = CpuGpuBuffer((NUM_ENTRIES, ITEM_FIELDS), torch.int32, device)
        self.rows, self.items = self._rows.device, self._items.device

    def fill(self, packed: PackedRows) -> None:
        """Describe a step of tree nodes only; call it when the device has finished the previous
        one."""
        assert packed.are_all_nodes, "only trees have splits"
        chunks, rows, items = packed.chunks, self._rows.host, self._items.host
        describe_tails(chunks.numbers, chunks.parents, chunks.depths, rows)
        list_items(chunks.numbers, rows, self.rows_per_tile, items)

    def send(self) -> None:
        """See :meth:`CpuGpuBuffer.send`."""
        self._rows.send()
        self._items.send()
