"""How the linear layers of a model on a CPU are stored and multiplied."""

from __future__ import annotations

import torch

from hdserve.engine.devices import multiplies_bfloat16
from hdserve.engine.row_linear import MAX_ROWS, replace_linear_layers

_MIN_MEAN_WEIGHTS = 1 << 19
"""Weights of a layer on average from which the kernel is worth its call from Python, about 12 us,
in which as many are read as a tenth of this."""

_ALL_ROWS = 1 << 40


def prepare_linear_layers(module: torch.nn.Module, is_exact: bool) -> None:
    """Choose how the layers are multiplied, in place; outside a CPU they stay as they are.

    The kernel is for layers that are large on average, and for all where results must be exact.
    Other float32 weights are stored by columns, which PyTorch multiplies faster.  In bfloat16 the
    kernel multiplies everything where the hardware cannot, and nothing where it can.
    """
    layers = _own_layers(module)
    if not layers or layers[0].weight.device.type != "cpu":
        return
    dtype = layers[0].weight.dtype
    is_emulated = dtype == torch.bfloat16 and not multiplies_bfloat16(torch.device("cpu"))
    is_large = sum(layer.weight.numel() for layer in layers) >= _MIN_MEAN_WEIGHTS * len(layers)
    if is_emulated:
        replace_linear_layers(module, _ALL_ROWS)
    elif is_exact or (is_large and dtype == torch.float32):
        replace_linear_layers(module, MAX_ROWS)
    elif dtype == torch.float32:
        _store_by_column(module)


def _own_layers(module: torch.nn.Module) -> list[torch.nn.Linear]:
    return [layer for layer in module.modules() if type(layer) is torch.nn.Linear]


def _store_by_column(module: torch.nn.Module) -> None:
    """Lay weights out by columns (docs/adr/0014).

    Those that are an embedding too stay as they are: it reads rows.
    """
    embedded = {
        id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Embedding)
    }
    for layer in _own_layers(module):
        if id(layer.weight) not in embedded:
            layer.weight.data = layer.weight.data.t().contiguous().t()
