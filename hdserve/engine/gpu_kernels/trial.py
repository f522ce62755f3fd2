"""Whether a GPU runs our kernels."""

from __future__ import annotations

from math import log

import numpy as np
import torch

from hdserve.engine.gpu_kernels.attend import GpuTreeAttention
from hdserve.engine.gpu_kernels.choices import find_and_draw
from hdserve.engine.gpu_kernels.move import RowMover
from hdserve.engine.gpu_kernels.multiply import RowProducts
from hdserve.engine.gpu_kernels.store import store_rows
from hdserve.engine.kernels import splits
from hdserve.engine.kernels.draw import NO_TOKEN
from hdserve.engine.kernels.rows import (
    FIRST_COLUMN,
    IS_CHOOSING,
    NUM_CHUNK_FIELDS,
    NUM_DECIDED,
    NUM_ROWS,
)
from hdserve.noise import exponential, noise_word

_SIZE = 256
_NUM_COLUMNS = 2048 + 61
"""More than one program of a kernel reads."""

_NUM_TOP = 8

_NUM_KEYS = 640
_SCALE = 0.125
_TOLERANCE = 0.02


def do_all_run(device: torch.device) -> bool:
    """Whether each of them gives correct results in the smallest case.

    Raises:
        Exception: a kernel cannot be compiled or run.
    """
    dtypes = torch.float32, torch.float16, torch.bfloat16
    found = [_runs(device, dtype) and _draws(device, dtype) for dtype in dtypes]
    for dtype in dtypes[1:]:
        found += [_attends(device, dtype, [0, 1, 0], 600), _attends(device, dtype, [], 200)]
    if RowProducts.are_fast_on(device):
        found += [_multiplies(device, num_inputs) for num_inputs in (_SIZE, _SIZE + 8)]
    return all(found)


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels that support any dtype give correct results."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    own_keys, own_values = torch.zeros((2, 1, 1, 2, 16), device=device, dtype=dtype)
    row = torch.ones((1, 1, 1, 16), device=device, dtype=dtype)
    store_rows(zero, row, row, own_keys[None], own_values[None])
    RowMover(device)([own_keys], [(0, 1)])
    return bool((own_keys == 1.0).all()) and own_values.sum().item() == 16


def _draws(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the likeliest tokens are found, and those are drawn that arrive first."""
    keys, inverse_temperatures = [1 << 40 | 5, 7, 1 << 62], [1.0, 0.0, 0.5]
    numbers = torch.randn((len(keys), _NUM_COLUMNS), device=device).to(dtype)
    bits = torch.tensor(inverse_temperatures, dtype=torch.float64).view(torch.int64)
    races = torch.stack((torch.tensor(keys), bits)).to(device)
    found = find_and_draw(numbers, _NUM_TOP, races)
    columns = found[1].view(torch.int32).tolist()
    rows = numbers.double().tolist()
    for row, key, scale, (*largest, drawn) in zip(
        rows, keys, inverse_temperatures, columns, strict=True
    ):
        order = sorted(range(_NUM_COLUMNS), key=row.__getitem__, reverse=True)
        arrivals = [
            scale * each - log(exponential(noise_word(key, i))) for i, each in enumerate(row)
        ]
        first = max(range(_NUM_COLUMNS), key=arrivals.__getitem__) if scale else NO_TOKEN
        if (largest, drawn) != (order[:_NUM_TOP], first):
            return False
    return True


def _attends(device: torch.device, dtype: torch.dtype, parents: list[int], num_cached: int) -> bool:
    """Whether the nodes of a tree get the same results as by PyTorch's attention, with and without
    a window.

    Args:
        parents: of the drafts.
    """
    paths = [[0]]
    for node, parent in enumerate(parents, 1):
        paths.append([*paths[parent], node])
    chunks = np.zeros((1, NUM_CHUNK_FIELDS), np.int64)
    chunks[0, NUM_DECIDED], chunks[0, NUM_ROWS] = 1, len(paths)
    chunks[0, FIRST_COLUMN], chunks[0, IS_CHOOSING] = num_cached, 1
    rows = np.empty((len(paths), splits.ROW_FIELDS), np.int32)
    items = np.empty((splits.NUM_ENTRIES, splits.ITEM_FIELDS), np.int32)
    depths = np.array([len(path) - 1 for path in paths[1:]], np.int64)
    splits.describe_tails(chunks, np.array(parents, np.int64), depths, rows)
    splits.list_items(chunks, rows, splits.QUERIES, items)
    rows_there, items_there = (torch.from_numpy(each).to(device) for each in (rows, items))
    query, keys, values = torch.randn((3, 1, 1, _NUM_KEYS, 64), device=device, dtype=dtype)
    query = query[:, :, : len(paths)]
    attend = GpuTreeAttention(device)
    for window in (None, num_cached * 2 // 3):
        seen = rows_there, items_there, splits.QUERIES
        found = attend(*seen, query, keys, values, _SCALE, window, None, None)[0, :, 0]
        for node, path in enumerate(paths):
            ancestors = [num_cached + each for each in path]
            visible = [*range(num_cached), *ancestors][-(window or _NUM_KEYS) :]
            scores = keys[0, 0, visible].float() @ query[0, 0, node].float() * _SCALE
            wanted = scores.softmax(dim=0) @ values[0, 0, visible].float()
            if not (found[node] - wanted).norm() < _TOLERANCE * wanted.norm():
                return False
    return True


def _multiplies(device: torch.device, num_inputs: int) -> bool:
    ones = torch.ones((64, num_inputs), device=device, dtype=torch.bfloat16)
    (products,) = RowProducts(device)(ones[:1], [ones], [None])
    return bool((products == num_inputs).all())
