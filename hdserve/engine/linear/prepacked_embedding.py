"""Embeddings that share the prepacked weights of a linear layer (docs/adr/0034)."""

from __future__ import annotations

import torch

from hdserve.engine.kernels.prepacked_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_weights import in_words, unpack_weights


class PrepackedEmbedding(torch.nn.Module):
    """An embedding that reads its rows from the prepacked weights of a layer.

    Args:
        layer: one that :func:`has_rows`.
    """

    def __init__(self, layer: PrepackedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.out_features, layer.in_features
        self.prepacked = layer.prepacked

    @property
    def weight(self) -> torch.Tensor:
        """The weights as PyTorch has them."""
        return unpack_weights(self.prepacked, self.num_embeddings)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        streams = in_words(self.prepacked).flatten(0, 1)
        width = streams.shape[-2]
        return streams[input // width, :, input % width].flatten(-2)


def has_rows(layer: torch.nn.Linear) -> bool:
    """Whether its prepacked weights hold each output only once, so that an embedding can read
    it."""
    return layer.out_features % OUTPUTS_PER_BLOCK == 0
