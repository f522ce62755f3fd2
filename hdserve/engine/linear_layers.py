"""How the linear layers of a model on a CPU are stored and multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hdserve.engine.kernel_choice import max_rows_faster
from hdserve.engine.row_linear import can_multiply, is_plain, multiply_rows, replace_linear_layers
from hdserve.engine.workers import Workers

_MIN_MEAN_WEIGHTS = 1 << 19
"""Weights of a layer on average from which the kernel is worth its call from Python, about 12 us,
in which a tenth as many are read."""

_TRIED_COUNTS = (4, 8, 16, 32, 256)
_ALL_ROWS = 1 << 40
_TRIED_WEIGHTS = 1 << 24
"""Of the tried layer at most, so that the trial is short."""


def prepare_linear_layers(module: torch.nn.Module, is_exact: bool) -> None:
    """Choose how the layers are multiplied, in place; outside a CPU they stay as they are.

    The kernel is for all layers where results must be exact.  Else it is for bfloat16 and for
    models whose layers are large, up to as many rows as it is faster for than PyTorch, which is
    tried.  Other float32 weights are stored by columns, which PyTorch multiplies faster.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    layers = [layer for layer in layers if is_plain(layer)]
    if not layers or layers[0].weight.device.type != "cpu":
        return
    is_float32 = layers[0].weight.dtype == torch.float32
    is_large = sum(layer.weight.numel() for layer in layers) >= _MIN_MEAN_WEIGHTS * len(layers)
    max_rows = _max_rows(layers) if is_large or not is_float32 else 0
    if is_exact or max_rows:
        replace_linear_layers(module, max_rows)
    elif is_float32:
        _store_by_column(module, layers)


@torch.inference_mode()
def _max_rows(layers: list[torch.nn.Linear]) -> int:
    """For how many rows the kernel is as fast as PyTorch, tried with the largest layer that is not
    too large."""
    weights = [layer.weight for layer in layers if can_multiply(layer)]
    if not weights:
        return 0
    weight = max(weights, key=lambda each: (each.numel() <= _TRIED_WEIGHTS, each.numel()))
    weight = weight[: max(4, _TRIED_WEIGHTS // weight.shape[1] // 4 * 4)]
    workers = Workers()
    rows = torch.zeros((_TRIED_COUNTS[-1], weight.shape[1]), dtype=weight.dtype)
    found = max_rows_faster(
        _TRIED_COUNTS,
        lambda count: multiply_rows(rows[:count], weight, workers),
        lambda count: F.linear(rows[:count], weight),
    )
    return _ALL_ROWS if found == _TRIED_COUNTS[-1] else found


def _store_by_column(module: torch.nn.Module, layers: list[torch.nn.Linear]) -> None:
    """Lay weights out by columns (docs/adr/0014).

    Those that are an embedding too stay as they are: it reads rows.
    """
    embedded = {
        id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)
    }
    for layer in layers:
        if id(layer.weight) not in embedded:
            layer.weight.data = layer.weight.data.t().contiguous().t()
