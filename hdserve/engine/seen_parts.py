"""What the rows of a forward of draft trees see, as
:mod:`~hdserve.engine.gpu_kernels.attend` reads it."""

from __future__ import annotations

import torch

from hdserve.engine.kernels.parts import MAX_ROWS, NUM_FIELDS, describe_parts
from hdserve.engine.kv_cache import align
from hdserve.engine.mirror import Mirror
from hdserve.engine.packed_rows import PackedRows
from hdserve.engine.row_buffers import ALIGNMENT


class SeenParts:
    """Filled for each step and copied to the device at once; where it lies never changes.

    Args:
        num_rows: of the forwards, padding included.

    Attributes:
        fields: int32 ``[NUM_FIELDS, at least num_rows]``, see
            :mod:`hdserve.engine.kernels.parts`.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        assert num_rows <= MAX_ROWS, "there is room for so many"
        self._fields = Mirror((NUM_FIELDS, align(num_rows, ALIGNMENT)), torch.int32, device)
        self.fields = self._fields.there

    def fill(self, packed: PackedRows) -> None:
        """Describe a step of nodes alone; to be called when the device is done with the last
        one."""
        assert packed.are_all_nodes, "only trees have parts"
        chunks = packed.chunks
        describe_parts(chunks.numbers, chunks.parents, chunks.depths, self._fields.here)
        self._fields.send()
