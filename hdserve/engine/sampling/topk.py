"""The largest entries of rows of logits, on a CPU faster than ``argmax`` and ``topk``.

One thread, best times in us; second number: our kernel.

=============  ================  =================
rows           argmax            topk, 8
=============  ================  =================
1 of 8,192       17      13        29      11
17 of 8,192     261      27       356      76
64 of 8,192     936     110     1,350     314
17 of 152,000 4,658     516     6,772     606
=============  ================  =================
"""

from __future__ import annotations

import torch

from hdserve.engine.kernels.top import find_largest


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """The index of the largest entry of each row, ``[num_rows]``: the first among equals."""
    return topk(rows, 1)[1][:, 0]


def topk(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest entries of each row: values and indices, ``[num_rows, k]``, largest first.
    Of equal entries the first comes first; by PyTorch, only column 0 is sure to, so that the
    likeliest token never depends on ``k``.  The kernel gives float32 values; if a row has fewer
    than ``k`` entries above minus infinity, it fills up with minus infinity and index 0."""
    is_bfloat16 = can_be_read(rows, torch.bfloat16)
    if not (is_bfloat16 or can_be_read(rows)):
        return _topk_of_torch(rows, k)
    num_rows, num_columns = rows.shape
    values = torch.empty((num_rows, k))
    indices = torch.empty((num_rows, k), dtype=torch.int64)
    addresses = values.data_ptr(), indices.data_ptr()
    find_largest(rows.data_ptr(), is_bfloat16, num_rows, num_columns, *addresses, k)
    return values, indices


def _topk_of_torch(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest by PyTorch.  Its ``topk`` returns equal entries in any order and its
    ``max`` the first; both treat NaN as the largest, so it is replaced."""
    rows = rows.masked_fill(rows.isnan(), -torch.inf)
    first = rows.max(dim=-1, keepdim=True)
    if k == 1:
        return first.values, first.indices
    values, indices = rows.topk(k, dim=-1)
    indices = torch.where(indices == first.indices, indices[:, :1], indices)
    indices[:, :1] = first.indices
    return values, indices


def can_be_read(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels for numbers of ``dtype`` can read ``rows`` in place."""
    return rows.device.type == "cpu" and rows.dtype is dtype and rows.is_contiguous()
