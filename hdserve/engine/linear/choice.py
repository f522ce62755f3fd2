"""Which kernel multiplies a linear layer: the table of :mod:`hdserve.engine.linear`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto

import torch

from hdserve.engine.hardware.devices import has_amx_bf16
from hdserve.engine.linear.prepacked import can_prepack
from hdserve.engine.linear.prepacked_embedding import only_reads_rows
from hdserve.engine.linear.shared import is_plain, linear_layers_of
from hdserve.engine.linear.skinny import can_multiply


class Kernel(Enum):
    """What multiplies the rows of a layer.

    Attributes:
        OWN: the layer's own code: PyTorch's, or that of quantised weights.
        GPU: see :class:`~hdserve.engine.linear.gpu_skinny.GpuSkinnyLinear`.
        PREPACKED: see :class:`~hdserve.engine.linear.prepacked.PrepackedLinear`.
        SKINNY: see :class:`~hdserve.engine.linear.skinny.SkinnyLinear`.
    """

    OWN = auto()
    GPU = auto()
    PREPACKED = auto()
    SKINNY = auto()


def kernels_of(module: torch.nn.Module, *, is_exact: bool) -> Mapping[torch.nn.Linear, Kernel]:
    """The kernel of each linear layer."""
    found = modules_by_weight(module)
    return {
        layer: kernel_for(layer, sharing, is_exact=is_exact)
        for sharing in found.values()
        for layer in sharing
        if isinstance(layer, torch.nn.Linear)
    }


def kernel_for(
    layer: torch.nn.Linear, sharing: Collection[torch.nn.Module], *, is_exact: bool
) -> Kernel:
    """The kernel of one layer.

    Args:
        sharing: all modules that have its weight.
        is_exact: whether a row must get the same bits whatever else is in a product.
    """
    if not is_plain(layer):
        return Kernel.OWN
    if layer.weight.device.type != "cpu":
        return Kernel.GPU
    if has_amx_bf16(layer.weight.device, layer.weight.dtype) and not is_exact:
        return Kernel.OWN
    if can_prepack(layer) and all(only_reads_rows(each) for each in sharing if each is not layer):
        return Kernel.PREPACKED
    return Kernel.SKINNY if can_multiply(layer) else Kernel.OWN


def modules_by_weight(module: torch.nn.Module) -> Mapping[torch.Tensor, Sequence[torch.nn.Module]]:
    """For each parameter that is the weight of linear layers, all modules that have it."""
    found: dict[torch.Tensor, list[torch.nn.Module]] = defaultdict(list)
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            found[parameter].append(each)
    weights = dict.fromkeys(layer._parameters.get("weight") for layer in linear_layers_of(module))
    return {weight: found[weight] for weight in weights if weight is not None}
