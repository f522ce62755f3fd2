"""Embeddings that share the turned weights of a linear layer (docs/adr/0034)."""

from __future__ import annotations

import torch

from hdserve.engine.kernels.turned_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.turned_linear import TurnedLinear
from hdserve.engine.turned_weights import in_pairs, turn_back


class TurnedEmbedding(torch.nn.Module):
    """An embedding that reads its rows from the turned weights of a layer.

    Args:
        layer: one that :func:`has_rows`.
    """

    def __init__(self, layer: TurnedLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.out_features, layer.in_features
        self.turned = layer.turned

    @property
    def weight(self) -> torch.Tensor:
        """The weights as PyTorch has them."""
        return turn_back(self.turned, self.num_embeddings)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        streams = in_pairs(self.turned).flatten(0, 1)
        width = streams.shape[-2]
        return streams[input // width, :, input % width].flatten(-2)


def has_rows(layer: torch.nn.Linear) -> bool:
    """Whether its turned weights hold each output only once, so that an embedding can read it."""
    return layer.out_features % OUTPUTS_PER_BLOCK == 0
