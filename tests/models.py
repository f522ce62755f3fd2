"""Tiny random models for the tests: two layers, 61 tokens, stock transformers classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

torch.set_num_threads(1)

VOCAB_SIZE = 61
MAX_POSITIONS = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_GROUPED))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_key_value_heads=2))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_GROUPED))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=11))


def _gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**_GROUPED, sliding_window=9, layer_types=layers)
    return Gemma3ForCausalLM(config)


def _gpt_neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES))


def _stablelm() -> PreTrainedModel:
    return StableLmForCausalLM(StableLmConfig(**_SIZES, num_key_value_heads=2))


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt_neox": _gpt_neox,
    "stablelm": _stablelm,
}


def make_model(
    architecture: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    """A random model whose logits are spread enough that its greedy output is not constant."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.to(dtype)
