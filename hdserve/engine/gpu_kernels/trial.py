"""Whether a GPU runs the kernels."""

from __future__ import annotations

import numpy as np
import torch

from hdserve.engine.gpu_kernels.attend import TreeAttention
from hdserve.engine.gpu_kernels.draw import draw_tokens
from hdserve.engine.gpu_kernels.move import RowMover
from hdserve.engine.gpu_kernels.multiply import RowProducts
from hdserve.engine.gpu_kernels.store import store_rows
from hdserve.engine.gpu_kernels.top import find_largest
from hdserve.engine.kernels.parts import NUM_FIELDS, describe_parts

_SIZE = 256
_NUM_CACHED = 200


def do_all_run(device: torch.device) -> bool:
    """Whether each of them does what it is for, in the smallest case.

    Raises:
        Exception: one cannot be compiled, or run.
    """
    dtypes = torch.float32, torch.float16, torch.bfloat16
    found = [_runs(device, dtype) for dtype in dtypes]
    found += [_attends(device, dtype) for dtype in dtypes[1:]]
    if RowProducts.are_fast_on(device):
        ones = torch.ones((64, _SIZE), device=device, dtype=torch.bfloat16)
        (products,) = RowProducts(device)(ones[:1], [ones], [None])
        found.append(bool((products == _SIZE).all()))
    return all(found)


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether those do that are not for some dtypes only."""
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]], device=device, dtype=dtype)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    column = find_largest(logits, 1)[1].view(torch.int32)
    token = draw_tokens(logits, zero, 1.0)
    own_keys, own_values = torch.zeros((2, 1, 1, 2, 16), device=device, dtype=dtype)
    row = torch.ones((1, 1, 1, 16), device=device, dtype=dtype)
    store_rows(zero, row, row, own_keys[None], own_values[None])
    RowMover(device)([own_keys], [(0, 1)])
    are_stored = bool((own_keys == 1.0).all()) and own_values.sum().item() == 16
    return are_stored and token.item() == column.item() == 1


def _attends(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a row that sees equal values gets them."""
    chunk = np.array([[0, 1, 1, _NUM_CACHED, 0, 1, 0]], np.int64)
    nothing, fields = np.zeros(0, np.int64), np.zeros((NUM_FIELDS, 16), np.int32)
    describe_parts(chunk, nothing, nothing, fields)
    keys = torch.randn((1, 1, _SIZE, 64), device=device, dtype=dtype)
    on_device = torch.from_numpy(fields).to(device)
    attend = TreeAttention(device)
    found = attend(on_device, keys[:, :, :1], keys, torch.ones_like(keys), 1.0, None, None, None)
    return bool(((found - 1.0).abs() < 0.01).all())
