"""Which weights of a model are prepacked (docs/adr/0034)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from hdserve.engine.linear.prepacked import PrepackedLinear, can_prepack
from hdserve.engine.linear.prepacked_embedding import PrepackedEmbedding, only_reads_rows
from hdserve.engine.linear.prepacked_streams import pick_num_streams
from hdserve.engine.linear.shared import linear_layers_of, replace_modules


def prepack_layers(module: torch.nn.Module) -> None:
    """Prepack the weights of all linear layers that the kernel can multiply, in place.

    Only the prepacked form is kept: an embedding that shares such weights reads its rows from it.
    Weights that are shared in other ways are left as they are.
    """
    modules_by_weight = _modules_by_weight(module)
    chosen = [
        (layer, sharing)
        for sharing in modules_by_weight.values()
        if (layer := _to_prepack(sharing)) is not None
    ]
    if not chosen:
        return  # perhaps as the processor has no kernel, with which streams could be tried
    num_streams = pick_num_streams(sum(weight.nbytes for weight in modules_by_weight))
    for layer, sharing in chosen:
        prepacked = PrepackedLinear(layer, num_streams)
        layer.weight.data = layer.weight.data.new_empty(0)
        found = {each: PrepackedEmbedding(prepacked, each) for each in sharing if each is not layer}
        replace_modules(module, {**found, layer: prepacked})


def _modules_by_weight(
    module: torch.nn.Module,
) -> Mapping[torch.nn.Parameter, Sequence[torch.nn.Module]]:
    """For each parameter that is the weight of linear layers, all modules that have it."""
    found: dict[torch.nn.Parameter, list[torch.nn.Module]] = defaultdict(list)
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            found[parameter].append(each)
    weights = dict.fromkeys(layer._parameters.get("weight") for layer in linear_layers_of(module))
    return {weight: found[weight] for weight in weights if weight is not None}


def _to_prepack(sharing: Sequence[torch.nn.Module]) -> torch.nn.Linear | None:
    """The one layer among those that share a weight, if it can be prepacked and the others can use
    the prepacked weight."""
    layers = [each for each in sharing if isinstance(each, torch.nn.Linear) and can_prepack(each)]
    if len(layers) != 1:
        return None
    (layer,) = layers
    are_embeddings = all(only_reads_rows(each) for each in sharing if each is not layer)
    return layer if are_embeddings else None
