"""What a token stores is read off what attention is given."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from hdserve.config import EngineConfig
from hdserve.engine.kv_cache.shape import LayerShape
from hdserve.engine.loading.loader import prepare_model
from hdserve.errors import UnsupportedModel
from tests.models import make_model

SHAPES = {
    "llama": [LayerShape(2, 8, 8)] * 2,
    "gemma4": [LayerShape(2, 8, 8), LayerShape(2, 16, 16)] * 2,
    "deepseek": [LayerShape(4, 16, 8)] * 2,
}


@pytest.mark.parametrize("architecture", SHAPES)
def test_every_layer_has_its_own_shape(architecture: str) -> None:
    """Also where its keys are those of another, or larger than what they are made of."""
    loaded = prepare_model(make_model(architecture), EngineConfig())
    assert [*loaded.kv_shape.layers] == SHAPES[architecture]
    numbers = sum(heads * (key + value) for heads, key, value in SHAPES[architecture])
    assert loaded.kv_shape.bytes_per_token(torch.bfloat16) == 2 * numbers


def test_a_layer_without_a_number_is_found() -> None:
    model = make_model()
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(UnsupportedModel, match="the attention of some of its layers"):
        prepare_model(model, EngineConfig())


def test_a_model_that_refuses_to_run_is_refused_with_its_reason() -> None:
    def refuse(*_: torch.Tensor, **__: torch.Tensor) -> None:
        raise ValueError("not without a picture")

    model = make_model()
    model.model.layers[1].forward = refuse
    with pytest.raises(UnsupportedModel, match="not without a picture"):
        prepare_model(model, EngineConfig())


def test_a_layer_without_attention_is_found() -> None:
    model = make_model()
    assert isinstance(model, LlamaForCausalLM)
    model.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModel, match="the attention of some of its layers"):
        prepare_model(model, EngineConfig())
