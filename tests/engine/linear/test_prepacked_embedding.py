"""An embedding of prepacked weights is the embedding it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hdserve.engine.kernels.prepacked_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_embedding import PrepackedEmbedding, only_reads_rows
from tests.engine.linear.test_prepacked import DTYPES, make_layer, needs_kernel


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("size", [(1,), (1, 9), (2, 3), (0,)])
@pytest.mark.parametrize("num_spare", [0, 16, 33], ids="vocabulary of 3 blocks and {}".format)
@torch.inference_mode()
def test_an_embedding_reads_prepacked_weights(
    num_spare: int, size: tuple[int, ...], num_streams: int, dtype: torch.dtype
) -> None:
    layer = make_layer(96, 3 * OUTPUTS_PER_BLOCK + num_spare, dtype=dtype)
    embedding = PrepackedEmbedding(PrepackedLinear(layer, num_streams), torch.nn.Embedding(1, 1))
    for token_ids in (torch.randint(layer.out_features, size), torch.arange(layer.out_features)):
        assert torch.equal(embedding(token_ids), F.embedding(token_ids, layer.weight))
    assert torch.equal(embedding.weight, layer.weight)
    with pytest.raises(IndexError):
        embedding(torch.tensor([layer.out_features]))


class ScaledEmbedding(torch.nn.Embedding):
    """As Gemma has; it adds ``shift`` to rows, which Gemma does not."""

    def __init__(self, scale: float | torch.Tensor, shift: float = 0.0) -> None:
        super().__init__(2 * OUTPUTS_PER_BLOCK, 96, dtype=torch.bfloat16)
        self.embed_scale, self.shift = scale, shift

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale = torch.as_tensor(self.embed_scale).to(self.weight.dtype)
        return super().forward(input) * scale + self.shift


@needs_kernel
@torch.inference_mode()
def test_an_embedding_may_multiply_its_rows() -> None:
    embedding = ScaledEmbedding(torch.tensor(9.797959))
    layer = make_layer(96, 2 * OUTPUTS_PER_BLOCK)
    layer.weight.data = embedding.weight.data
    found = PrepackedEmbedding(PrepackedLinear(layer), embedding)
    token_ids = torch.arange(layer.out_features)[None]
    assert torch.equal(found(token_ids), embedding(token_ids))


def test_embeddings_that_do_more_than_read_rows_are_told_apart() -> None:
    scale = torch.tensor(9.797959)
    assert only_reads_rows(torch.nn.Embedding(4, 8))
    assert only_reads_rows(ScaledEmbedding(scale))
    assert not only_reads_rows(ScaledEmbedding(scale, shift=1.0))
    assert not only_reads_rows(ScaledEmbedding(1.0)), "whose product may be rounded otherwise"
    assert not only_reads_rows(torch.nn.Embedding(4, 8, max_norm=1.0))
    assert not only_reads_rows(torch.nn.Linear(4, 8))
