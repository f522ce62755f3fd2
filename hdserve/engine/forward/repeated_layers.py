"""The layers of a model as one piece of code, which is compiled once and called for each.

Layers mostly differ only in their weights, and a compiler that sees all of them takes as many times
as long (docs/adr/0026).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.modeling_layers import GradientCheckpointingLayer

_MIN_LAYER_BYTES: Final = 1 << 24
"""If layers have more bytes of weights than this on average, a CPU calls a layer's code from
Python.  C++ code of the whole model takes nine times as long to compile, and was not measurably
faster at 30 MB a layer, and up to 4 % faster at 7 MB (docs/adr/0026)."""

_MARK: Final = "__marked_compile_region_fn__"
"""The attribute by which PyTorch's compiler recognises a region."""


def should_repeat(module: torch.nn.Module) -> bool:
    """Whether a compiled model is to call its layers' code from Python: on a GPU, where CUDA graphs
    are captured anyway, and on a CPU if its layers are large; not if it has quantised weights that
    are tensor subclasses, which regions do not support, or its layers do not use the forward of
    their class."""
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
    """Make the compiler generate code of one layer and call it for all that differ only in tensors;
    changes nothing else."""
    layers = [*_layers_of(module)]

    def run(layer: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        return type(layer).forward(layer, *arguments, **options)

    region = torch.compiler.nested_compile_region(run, max_reuse_entries=max(1, len(layers)))
    for layer in layers:
        layer.forward = MethodType(region, layer)


def unroll_layers(module: torch.nn.Module) -> None:
    """Undo :func:`repeat_layers`."""
    for layer in filter(_is_repeated, _layers_of(module)):
        del vars(layer)["forward"]


def _is_repeated(layer: torch.nn.Module) -> bool:
    return hasattr(getattr(vars(layer).get("forward"), "__func__", None), _MARK)


def _layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers with layer-number tensors
    (:func:`~hdserve.engine.attention.packed.number_layers`)."""
    for each in module.modules():
        is_layer = isinstance(each, GradientCheckpointingLayer)
        if is_layer and any(hasattr(part, "layer_number") for part in each.modules()):
            yield each
