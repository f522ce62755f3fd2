"""Linear layers that replace those of a model and use the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


class SharedLinear(torch.nn.Linear):
    """A linear layer with the weights of another, which are not copied."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias


def linear_layers_of(module: torch.nn.Module) -> Iterator[torch.nn.Linear]:
    """All linear layers of a model, of any kind."""
    return (layer for layer in module.modules() if isinstance(layer, torch.nn.Linear))


def is_plain(layer: torch.nn.Module) -> bool:
    """Whether it is PyTorch's own linear layer with an ordinary weight tensor: quantised weights
    are tensor subclasses that hold other tensors."""
    return type(layer) is torch.nn.Linear and type(layer.weight.data) is torch.Tensor


def replace_modules(
    module: torch.nn.Module, found: Mapping[torch.nn.Module, torch.nn.Module]
) -> None:
    """Replace each module that is a key of ``found`` by its value, wherever ``module`` has it."""
    for parent in [*module.modules()]:
        for name, child in [*parent._modules.items()]:
            if child is not None and child in found:
                setattr(parent, name, found[child])
