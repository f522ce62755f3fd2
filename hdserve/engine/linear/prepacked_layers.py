"""Prepacks the weights of a model (docs/adr/0034)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hdserve.engine.linear.choice import Kernel, modules_by_weight
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_embedding import PrepackedEmbedding
from hdserve.engine.linear.prepacked_streams import pick_num_streams
from hdserve.engine.linear.shared import replace_modules


def prepack_layers(module: torch.nn.Module, kernels: Mapping[torch.nn.Linear, Kernel]) -> None:
    """Prepack the weights of the layers whose kernel is ``PREPACKED``, in place.

    Only the prepacked form is kept: an embedding that shares such weights reads its rows from it.
    """
    chosen = [layer for layer, kernel in kernels.items() if kernel is Kernel.PREPACKED]
    if not chosen:
        return  # perhaps as the processor has no kernel, with which streams could be tried
    found = modules_by_weight(module)
    num_streams = pick_num_streams(sum(weight.nbytes for weight in found))
    for layer in chosen:
        embeddings = [each for each in found[layer.weight] if each is not layer]
        prepacked = PrepackedLinear(layer, num_streams)
        layer.weight.data = layer.weight.data.new_empty(0)
        replaced = {each: PrepackedEmbedding(prepacked, each) for each in embeddings}
        replace_modules(module, {**replaced, layer: prepacked})
