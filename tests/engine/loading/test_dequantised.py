"""Weights that are stored in eight bits, and that transformers makes numbers of again on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.loading.loader import load_model

pytest.importorskip("accelerate", reason="needs hdserve[quantized]", exc_type=ModuleNotFoundError)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
BLOCK = 32
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def stored(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in FP8, and by what each of its blocks is scaled."""
    num_rows, num_columns = weight.shape
    blocks = weight.float().view(num_rows // BLOCK, BLOCK, num_columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scaled = (blocks / scales[:, None, :, None]).view(num_rows, num_columns)
    return scaled.to(torch.float8_e4m3fn), scales


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, eos_token_id=None)).bfloat16()


@pytest.fixture(scope="module")
def checkpoint(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the hub has models in FP8."""
    place = tmp_path_factory.mktemp("fp8")
    model.save_pretrained(place)
    tensors = {}
    for name, tensor in load_file(place / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = stored(tensor)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_they_have_the_dtype_that_was_asked_for(
    checkpoint: Path, model: Qwen3ForCausalLM, dtype: str
) -> None:
    engine = EngineConfig(dtype=dtype, device="cpu", compile=False)
    loaded = load_model(ModelConfig(name="a", model=str(checkpoint), engine=engine))
    wanted = dict(model.named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        torch.testing.assert_close(parameter.float(), wanted[name].float(), rtol=0.07, atol=1e-3)
