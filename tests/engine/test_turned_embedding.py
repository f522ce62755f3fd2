"""An embedding of turned weights is the embedding it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hdserve.engine.kernels.registers import HAS_PAIRS
from hdserve.engine.kernels.turned_tiles import OUTPUTS_PER_BLOCK
from hdserve.engine.turned_embedding import TurnedEmbedding, has_rows
from hdserve.engine.turned_linear import TurnedLinear
from tests.engine.test_turned_linear import make_layer


@pytest.mark.skipif(not HAS_PAIRS, reason="the processor has no products of bfloat16 in pairs")
@pytest.mark.parametrize("num_streams", [1, 2])
@pytest.mark.parametrize("size", [(1,), (1, 9), (2, 3), (0,)])
@torch.inference_mode()
def test_an_embedding_reads_turned_weights(size: tuple[int, ...], num_streams: int) -> None:
    layer = make_layer(96, 3 * OUTPUTS_PER_BLOCK)
    embedding = TurnedEmbedding(TurnedLinear(layer, num_streams))
    token_ids = torch.randint(layer.out_features, size)
    assert torch.equal(embedding(token_ids), F.embedding(token_ids, layer.weight))
    assert torch.equal(embedding.weight, layer.weight)


def test_each_output_is_in_one_place() -> None:
    assert has_rows(make_layer(64, 2 * OUTPUTS_PER_BLOCK))
    assert not has_rows(make_layer(64, OUTPUTS_PER_BLOCK + 16))
