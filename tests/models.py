"""Tiny random models for the tests: two layers, 61 tokens, stock transformers classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
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


def _llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_GROUPED, **options}))


def _qwen2(**options: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SIZES, "num_key_value_heads": 2, **options}))


def _qwen3(**options: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_GROUPED, **options}))


def _mistral(**options: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**_GROUPED, **options}, sliding_window=11))


def _gemma3(**options: Any) -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**{**_GROUPED, **options}, sliding_window=9, layer_types=layers)
    return Gemma3ForCausalLM(config)


def _gemma4(**options: Any) -> PreTrainedModel:
    """With eyes, which text goes past, heads of two sizes, and layers that attend to the keys of
    others."""
    others = {"num_hidden_layers": 4, "pad_token_id": 0, "global_head_dim": 16}
    sizes = {**_GROUPED, **others, **options}
    inputs = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 4}
    layers = ["sliding_attention", "full_attention"] * 2
    text = Gemma4TextConfig(
        **sizes, **inputs, sliding_window=9, layer_types=layers, num_kv_shared_layers=2
    )
    eyes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"model_type": "gemma4_vision", **eyes, **heads}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    return Gemma4ForConditionalGeneration(config)


def _gpt_oss(**options: Any) -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}  # so that rounding chooses none
    model = GptOssForCausalLM(
        GptOssConfig(**{**_GROUPED, **options}, **experts, sliding_window=9, layer_types=layers)
    )
    model.set_experts_implementation("eager")  # the others know no float64
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def _deepseek(**options: Any) -> PreTrainedModel:
    """Its own cache would hold what keys and values are made of."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 12}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
    sizes = {**_SIZES, **ranks, **heads, "num_key_value_heads": 4, **options}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, first_k_dense_replace=2))


def _gpt_neox(**options: Any) -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**_SIZES, **options}))


def _stablelm(**options: Any) -> PreTrainedModel:
    return StableLmForCausalLM(StableLmConfig(**{**_SIZES, "num_key_value_heads": 2, **options}))


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt_oss": _gpt_oss,
    "deepseek": _deepseek,
    "gpt_neox": _gpt_neox,
    "stablelm": _stablelm,
}


def make_model(
    architecture: str = "llama",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: int,
) -> PreTrainedModel:
    """A random model whose logits are spread enough that its greedy output is not constant.

    Args:
        options: of its configuration, instead of those here.
    """
    torch.manual_seed(seed)
    model = ARCHITECTURES[architecture](**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.to(dtype)
