"""Models of real shapes with random weights: true step times if the weights are not available."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from hdserve.config import ModelConfig
from hdserve.engine.hardware.devices import pick_device, pick_dtype
from hdserve.engine.host import ModelHost
from hdserve.engine.loading.loader import prepare_model
from hdserve.errors import ConfigError


def _llama(width: int, layers: int, heads: int, kv_heads: int, feed_forward: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def _qwen2(
    width: int, layers: int, heads: int, kv_heads: int, feed_forward: int, *, is_tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        max_position_embeddings=32768,
        tie_word_embeddings=is_tied,
    )


SHAPES: Mapping[str, Any] = MappingProxyType(
    {
        "tinyllama-1.1b": _llama(2048, 22, 32, 4, 5632),
        "llama-2-7b": _llama(4096, 32, 32, 32, 11008),
        "llama-2-13b": _llama(5120, 40, 40, 40, 13824),
        "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, is_tied=True),
        "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, is_tied=True),
        "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, is_tied=False),
    }
)
"""The configurations of published models, by name."""


def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Return a model of a published shape whose weights are noise.

    Raises:
        ConfigError: an unknown shape; the message names the known ones.
    """
    config = SHAPES.get(shape)
    if config is None:
        raise ConfigError(f"unknown shape {shape!r}; known shapes: {', '.join(SHAPES)}")
    torch.manual_seed(0)
    with device:
        make: Any = AutoModelForCausalLM.from_config
        model: torch.nn.Module = make(config, dtype=dtype)
    return model.eval()


def random_host(config: ModelConfig, shape: str) -> ModelHost:
    """Return a host of a random model, with the tokenizer of ``config``, which only has to exist,
    and no statistics, which would be of that tokenizer.

    Raises:
        ConfigError: an unknown shape.
    """
    device, dtype = pick_device(config.engine.device), config.engine.dtype
    module = random_model(shape, pick_dtype(dtype, device), device)
    config = config.model_copy(update={"statistics": None})
    return ModelHost(config, model=prepare_model(module, config.engine))
