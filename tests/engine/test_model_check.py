"""A model that packed attention would get wrong is refused when the engine is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.build import build_engine
from hdserve.engine.loader import load_model, prepare_model
from hdserve.errors import UnsupportedModel
from tests.engines import make_engine
from tests.models import ARCHITECTURES, VOCAB_SIZE, make_model

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def _gpt_neo() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    layers = [[["global", "local"], 1]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=VOCAB_SIZE, **sizes, attention_types=layers, window_size=8)
    )


def _gpt_oss() -> PreTrainedModel:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return GptOssForCausalLM(GptOssConfig(**SMALL, **experts, num_key_value_heads=2))


def _deepseek() -> PreTrainedModel:
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**SMALL, **ranks, **heads, first_k_dense_replace=2, num_key_value_heads=4)
    )


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gpt_neo": (_gpt_neo, "does not call the attention function"),
    "gpt_oss": (_gpt_oss, "other results in packed forwards"),
    "diffllama": (
        lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SMALL, num_key_value_heads=2)),
        "other results|does not call",
    ),
    "deepseek": (_deepseek, "cannot be run in packed forwards"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_be_wrong_are_refused(name: str) -> None:
    """An architecture of sinks, latent or differential attention, or with attention of its own, is
    refused by name before the first request."""
    make, reason = REFUSED[name]
    torch.manual_seed(0)
    model = make().eval()
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        make_engine(model=model, exact=False)
    assert type(model).__name__ in caught.value.message


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_that_are_right_are_served(architecture: str, dtype: torch.dtype) -> None:
    """The check does not take rounding for a difference, in any type."""
    make_engine(model=make_model(architecture, dtype), exact=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_is_served(dtype: str) -> None:
    """The same for trained weights."""
    engine = EngineConfig(dtype=dtype, exact=False, kv_cache_tokens=256)
    config = ModelConfig(name="a", model="hdserve-tiny", engine=engine)
    build_engine(config, load_model(config), ())


@pytest.mark.parametrize("max_model_len", [2, 6, 20])
def test_short_contexts_are_served(max_model_len: int) -> None:
    """Where the context is too short to try a tree, the model is served all the same."""
    engine = EngineConfig(max_model_len=max_model_len, exact=False)
    config = ModelConfig(name="a", model="a", engine=engine)
    build_engine(config, prepare_model(make_model(), engine), ())
