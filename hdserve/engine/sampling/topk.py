"""The largest entries of rows of logits, on a CPU faster than ``argmax`` and ``topk``.

One thread, float32, best times in us, each of rows that were not read before; second number: our
kernel.

=============  ================  =================
rows           argmax            topk, 8
=============  ================  =================
1 of 8,192       17       8        26       6
17 of 8,192     268      34       280      52
64 of 8,192     960     118     1,118     244
17 of 152,000 4,702     437     5,898     435
=============  ================  =================
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hdserve.engine.kernels.top import find_largest

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Tokens and their logits, ``[num_rows, k]``, the likeliest first."""


def argmax(rows: torch.Tensor) -> torch.Tensor:
    """The index of the largest entry of each row, ``[num_rows]``: the first among equals."""
    return topk(rows, 1)[1][:, 0]


def topk(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest entries of each row: values and indices, ``[num_rows, k]``, largest first.
    Of equal entries the first comes first; by PyTorch, only column 0 is sure to, so that the
    likeliest token never depends on ``k``.  The kernel gives float32 values; if a row has fewer
    than ``k`` entries above minus infinity, it fills up with minus infinity and index 0."""
    if not _have_kernel(rows):
        return _topk_of_torch(rows, k)
    indices, values = _find(rows, len(rows), k)
    return torch.from_numpy(values), torch.from_numpy(indices)


def find_tokens(logits: torch.Tensor, num_rows: int, k: int) -> Found:
    """The ``k`` likeliest tokens of each of the first ``num_rows`` rows, as :func:`topk` finds
    them; fetched from a GPU in one transfer."""
    if _have_kernel(logits):
        return _find(logits, num_rows, k)
    values, tokens = _topk_of_torch(logits[:num_rows], k)
    if values.device.type == "cpu":
        return tokens.numpy(), values.float().numpy()
    together = torch.stack((tokens.double(), values.double())).cpu().numpy()
    return together[0].astype(np.int64), together[1].astype(np.float32)


def _find(rows: torch.Tensor, num_rows: int, k: int) -> Found:
    """Those of the first ``num_rows`` rows, by the kernel."""
    tokens, values = np.empty((num_rows, k), np.int64), np.empty((num_rows, k), np.float32)
    is_bfloat16 = rows.dtype is torch.bfloat16
    find_largest(rows.data_ptr(), is_bfloat16, rows.shape[1], values, tokens)
    return tokens, values


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


def _have_kernel(rows: torch.Tensor) -> bool:
    return can_be_read(rows, torch.bfloat16, torch.float32)


def can_be_read(rows: torch.Tensor, *dtypes: torch.dtype) -> bool:
    """Whether kernels for numbers of one of ``dtypes`` can read ``rows`` in place."""
    return rows.dtype in dtypes and rows.is_cpu and rows.is_contiguous()
