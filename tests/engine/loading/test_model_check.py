"""A model that packed attention would get wrong is refused when the engine is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.build import build_engine
from hdserve.engine.loading.loader import load_model, prepare_model
from hdserve.engine.loading.model_check import relative_errors
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


def _bert() -> PreTrainedModel:
    return BertLMHeadModel(BertConfig(**SMALL))


def _gpt_neo() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    layers = [[["global", "local"], 1]]
    return GPTNeoForCausalLM(
        GPTNeoConfig(vocab_size=VOCAB_SIZE, **sizes, attention_types=layers, window_size=8)
    )


def _qwen2_moe(window: int = 32) -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2}
    options = {"use_sliding_window": True, "sliding_window": window, "num_key_value_heads": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **sizes, **options, num_experts_per_tok=1))


def _phimoe() -> PreTrainedModel:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return PhimoeForCausalLM(
        PhimoeConfig(**SMALL, **experts, **tokens, num_key_value_heads=2, sliding_window=32)
    )


def _deepseek_v3() -> PreTrainedModel:
    """With fewer heads of keys than of queries, which latent attention does not have."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    experts = {"first_k_dense_replace": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
    heads = {"v_head_dim": 8, "num_key_value_heads": 2}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, **latent, **experts, **heads))


def _doge() -> PreTrainedModel:
    return DogeForCausalLM(DogeConfig(**SMALL, num_key_value_heads=2, sliding_window=32))


def _qwen2_with_window() -> PreTrainedModel:
    options = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, **options, num_key_value_heads=2))


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "bert": (_bert, "lets tokens see those after them"),
    "gpt_neo": (_gpt_neo, "does not go through the attention interface"),
    "diffllama": (
        lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SMALL, num_key_value_heads=2)),
        "different results|does not go through",
    ),
    "qwen2_moe": (_qwen2_moe, "by masks alone.*max_model_len of at most 32"),
    "phimoe": (_phimoe, "by masks alone.*max_model_len of at most 32"),
    "deepseek_v3": (_deepseek_v3, "transformers itself cannot run it: RuntimeError"),
    "doge": (_doge, "changes the masks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_be_wrong_are_refused(name: str) -> None:
    """An architecture that looks ahead, of differential attention, or with attention of its own,
    is refused by name before the first request."""
    make, reason = REFUSED[name]
    torch.manual_seed(0)
    model = make().eval()
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        make_engine(model=model)
    assert type(model).__name__ in caught.value.message


@pytest.mark.usefixtures("untraced_attention")
@pytest.mark.parametrize("name", ["qwen2_moe", "phimoe"])
def test_what_no_kernel_changes_is_told_at_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where all rows attend in one call, as on a GPU, no kernel is given up before."""
    make, reason = REFUSED[name]
    torch.manual_seed(0)
    with pytest.raises(UnsupportedModel, match=reason):
        make_engine(model=make().eval(), exact=False, attends_in_one_call=True)
    assert "disabled" not in caplog.text


class _OldLlama(LlamaForCausalLM):
    """In the manner of code that comes with weights, and was written for an older library."""

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, num_logits_to_keep: int = 0, **options: Any
    ) -> Any:
        return super().forward(input_ids, **{**options, "logits_to_keep": num_logits_to_keep})


def test_a_model_that_ignores_what_it_is_asked_for_is_refused() -> None:
    """It would give the logits of all rows, and those of other rows would be taken."""
    torch.manual_seed(0)
    model = _OldLlama(LlamaConfig(**SMALL)).eval()
    with pytest.raises(UnsupportedModel, match="_OldLlama ignores logits_to_keep"):
        make_engine(model=model)


class _BiasedLlama(LlamaForCausalLM):
    """Gives its attention a tensor, which stock attention adds nothing for."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, score_bias=torch.zeros(1), **options)


def test_what_attention_is_given_besides_is_found() -> None:
    """Even where a short text does not show it."""
    torch.manual_seed(0)
    model = _BiasedLlama(LlamaConfig(**SMALL)).eval()
    with pytest.raises(UnsupportedModel, match="_BiasedLlama attends by score_bias"):
        make_engine(model=model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_that_are_right_are_served(architecture: str, dtype: torch.dtype) -> None:
    """The check does not take rounding for a difference, in any type."""
    make_engine(model=make_model(architecture, dtype))


def test_a_window_that_attention_is_told_of_is_served() -> None:
    """In the layers that have it."""
    make_engine(model=_qwen2_with_window().eval())


@pytest.mark.parametrize("options", [{"max_model_len": 32}, {"kv_cache_tokens": 32}], ids=str)
def test_a_window_that_no_sequence_exceeds_is_served(options: dict[str, int]) -> None:
    """Then the mask hides nothing."""
    make_engine(model=_qwen2_moe().eval(), **options)


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


def test_what_is_no_number_is_no_equal_one() -> None:
    """Unless the model itself makes none of some tokens."""
    wanted = torch.tensor([[1.0, 2.0], [1.0, torch.nan], [3.0, 5.0]])
    found = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [torch.nan, 5.0]])
    assert relative_errors(found[::2], wanted[::2]).tolist() == [0.0, torch.inf]
    assert relative_errors(found, wanted).tolist() == [0.0]
