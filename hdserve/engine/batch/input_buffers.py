"""What each row of a forward with a fixed number of rows is, on the device that runs it."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from hdserve.engine.batch.cpu_gpu_buffer import CpuGpuBuffer
from hdserve.engine.batch.packed_rows import PackedRows
from hdserve.engine.batch.races import write_races
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import align

ALIGNMENT: Final = 16
"""Numbers of rows are rounded up to multiples of this, so that every field is aligned for wide
loads."""


class InputBuffers:
    """Buffers that are filled for each step and sent to the device at once; their addresses never
    change.

    Args:
        num_rows: of the forwards, padding included.

    Attributes:
        token_ids, position_ids: ``[num_rows]``.
        kv_rows: ``[num_rows]``: the cache row each row is written to.
        logit_rows: ``[num_rows]``: all rows if all are nodes; else only the first ones are used.
        races: ``[2, num_rows]``, see :mod:`hdserve.engine.batch.races`.

    All of them are int64.
    """

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows = CpuGpuBuffer((6, align(num_rows, ALIGNMENT)), torch.int64, cache.device)
        rows = self._rows.device[:, :num_rows]
        self.token_ids, self.position_ids, self.kv_rows, self.logit_rows = rows[:4]
        self.races = rows[4:]

    def fill(self, packed: PackedRows) -> None:
        """Describe a step; call it when the device has finished the previous one."""
        rows = self._rows.host[:, : self.num_rows]
        rows[0], rows[1], rows[2] = packed.token_ids, packed.position_ids, packed.kv_rows
        if packed.are_all_nodes:
            rows[3] = np.arange(self.num_rows)
        else:
            rows[3, : len(packed.logit_rows)] = packed.logit_rows
        write_races(packed.races, rows[4:])

    def send(self) -> None:
        """See :meth:`CpuGpuBuffer.send`."""
        self._rows.send()
