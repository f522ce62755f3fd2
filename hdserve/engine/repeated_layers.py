"""The layers of a model as one piece of code, which is compiled once and called for each.

Layers differ in their weights alone, mostly, and a compiler that is shown all of them takes as many
times as long (docs/adr/0026).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.modeling_layers import GradientCheckpointingLayer

_MIN_LAYER_BYTES: Final = 1 << 24
"""From this mean number of bytes of weights per layer on, a CPU calls the code of a layer from
Python.  Code of the whole model in C++ takes nine times as long to compile.  With 30 MB a layer it
was not measurably faster, with 7 MB up to 4 % (docs/adr/0026)."""

_MARK: Final = "__marked_compile_region_fn__"
"""The attribute by which the compiler of PyTorch knows a region."""


def should_repeat(module: torch.nn.Module) -> bool:
    """Whether a compiled model is to call its layers' code from Python: on a GPU, where graphs of
    its kernels are made in any case, and on a CPU where its layers are large; not if they have
    quantised weights that stand for tensors, which regions do not take, or are called otherwise
    than their class says."""
    layers = [*_layers_of(module)]
    if any(is_traceable_wrapper_subclass(weights) for weights in module.parameters()):
        return False
    if any("forward" in vars(layer) and not _is_repeated(layer) for layer in layers):
        return False
    if not layers or next(module.parameters()).device.type != "cpu":
        return bool(layers)
    num_bytes = sum(weights.nbytes for layer in layers for weights in layer.parameters())
    return num_bytes >= _MIN_LAYER_BYTES * len(layers)


def repeat_layers(module: torch.nn.Module) -> None:
    """Have the compiler make code of one layer and call it for all that differ in tensors alone;
    else nothing changes."""
    layers = [*_layers_of(module)]

    def run(layer: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        return type(layer).forward(layer, *arguments, **options)

    region = torch.compiler.nested_compile_region(run, max_reuse_entries=max(1, len(layers)))
    for layer in layers:
        layer.forward = MethodType(region, layer)


def unroll_layers(module: torch.nn.Module) -> None:
    """Take :func:`repeat_layers` back."""
    for layer in filter(_is_repeated, _layers_of(module)):
        del vars(layer)["forward"]


def _is_repeated(layer: torch.nn.Module) -> bool:
    return hasattr(getattr(vars(layer).get("forward"), "__func__", None), _MARK)


def _layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers that attend by numbers (:func:`~hdserve.engine.attention.number_layers`)."""
    for each in module.modules():
        is_layer = isinstance(each, GradientCheckpointingLayer)
        if is_layer and any(hasattr(part, "layer_number") for part in each.modules()):
            yield each
