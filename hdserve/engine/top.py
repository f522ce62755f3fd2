"""The largest entries of rows of logits, on a CPU faster than ``argmax`` and ``topk``.

One thread, best us, and those of the kernel:

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
    """The ``k`` largest entries of each row: values and indices, ``[num_rows, k]``, largest first;
    the first among equals where there is a kernel, and everywhere in column 0, so that the
    likeliest token is the same whatever ``k`` is.  Values are float32 where there is a kernel, and
    where a row has fewer than ``k`` numbers above minus infinity the rest are that, of column 0."""
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
    """The ``k`` largest by PyTorch, whose ``topk`` begins with any of several largest ones, and
    whose ``max`` with the first.  To both nothing is larger than what is no number."""
    rows = rows.masked_fill(rows.isnan(), -torch.inf)
    first = rows.max(dim=-1, keepdim=True)
    if k == 1:
        return first.values, first.indices
    values, indices = rows.topk(k, dim=-1)
    indices = torch.where(indices == first.indices, indices[:, :1], indices)
    indices[:, :1] = first.indices
    return values, indices


def can_be_read(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels for numbers of ``dtype`` can work on ``rows`` where they are."""
    return rows.device.type == "cpu" and rows.dtype is dtype and rows.is_contiguous()
