"""What a token stores in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """What one token stores in a layer: ``num_heads`` keys of ``key_size`` and values of
    ``value_size`` numbers."""

    num_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token stores, layer by layer."""

    layers: tuple[LayerShape, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        size = sum(layer.num_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return size * dtype.itemsize
