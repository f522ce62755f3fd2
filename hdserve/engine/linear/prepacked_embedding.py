"""Embeddings that share the prepacked weights of a linear layer (docs/adr/0034)."""

from __future__ import annotations

import torch

from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_weights import in_words, places_of, unpack_weights

_TRIED_TOKENS = 8


class PrepackedEmbedding(torch.nn.Module):
    """An embedding that reads its rows from the prepacked weights of a layer.

    Args:
        replaced: the embedding it stands for, one that :func:`only_reads_rows`.
    """

    embed_scale: torch.Tensor | None

    def __init__(self, layer: PrepackedLinear, replaced: torch.nn.Module) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = layer.out_features, layer.in_features
        self.prepacked = layer.prepacked
        scale = _scale_of(replaced)
        found = None if scale is None else scale.to(self.prepacked.dtype)
        self.register_buffer("embed_scale", found, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as PyTorch has them."""
        return unpack_weights(self.prepacked, self.num_embeddings)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        streams = in_words(self.prepacked).flatten(0, 1)
        width, places = streams.shape[-2], places_of(input, self.num_embeddings)
        rows = streams[places // width, :, places % width].flatten(-2)
        return rows if self.embed_scale is None else rows * self.embed_scale


@torch.inference_mode()
def only_reads_rows(module: torch.nn.Module) -> bool:
    """Whether it is PyTorch's own embedding, or one that also multiplies rows by its
    ``embed_scale``, as Gemma's do."""
    if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None:
        return False
    scale = _scale_of(module)
    if scale is None:
        return type(module) is torch.nn.Embedding
    rows = module.weight[:_TRIED_TOKENS]
    return torch.equal(module(torch.arange(len(rows))), rows * scale.to(rows.dtype))


def _scale_of(embedding: torch.nn.Module) -> torch.Tensor | None:
    scale = getattr(embedding, "embed_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None
