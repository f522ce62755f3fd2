"""An embedding of prepacked weights is the embedding it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hdserve.engine.kernels.prepacked_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.linear.prepacked import PrepackedLinear
from hdserve.engine.linear.prepacked_embedding import PrepackedEmbedding, has_rows
from tests.engine.linear.test_prepacked import DTYPES, make_layer, needs_kernel


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("size", [(1,), (1, 9), (2, 3), (0,)])
@torch.inference_mode()
def test_an_embedding_reads_prepacked_weights(
    size: tuple[int, ...], num_streams: int, dtype: torch.dtype
) -> None:
    layer = make_layer(96, 3 * OUTPUTS_PER_BLOCK, dtype=dtype)
    embedding = PrepackedEmbedding(PrepackedLinear(layer, num_streams))
    token_ids = torch.randint(layer.out_features, size)
    assert torch.equal(embedding(token_ids), F.embedding(token_ids, layer.weight))
    assert torch.equal(embedding.weight, layer.weight)


def test_each_output_is_in_one_place() -> None:
    assert has_rows(make_layer(64, 2 * OUTPUTS_PER_BLOCK))
    assert not has_rows(make_layer(64, OUTPUTS_PER_BLOCK + 16))
