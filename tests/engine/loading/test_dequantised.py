"""Weights of eight and of four bits, which transformers makes ordinary ones again on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hdserve.config import EngineConfig, ModelConfig
from hdserve.doctor.weights import weight_bytes
from hdserve.engine.loading.loader import load_model
from tests.engine.loading.test_unknown_quantisation import LARGEST_FP8
from tests.engine.loading.test_unknown_quantisation import SIZES as _SIZES

pytest.importorskip("accelerate", reason="needs hdserve[quantized]", exc_type=ModuleNotFoundError)

SIZES = _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None}
BLOCK = 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = Mapping[str, torch.Tensor]


def in_fp8(name: str, weight: torch.Tensor) -> Tensors:
    """A matrix in FP8, and what each of its blocks is scaled by."""
    num_rows, num_columns = weight.shape
    blocks = weight.view(num_rows // BLOCK, BLOCK, num_columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST_FP8
    scaled = (blocks / scales[:, None, :, None]).view(num_rows, num_columns)
    return {name: scaled.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def in_mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    """Matrices of experts, two numbers a byte, and the exponents of their blocks."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, BLOCK))
    exponents = (blocks.abs().amax(-1) / FP4.max()).log2().ceil()
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).to(torch.uint8)}


def save(
    model: PreTrainedModel,
    place: Path,
    quantization: Mapping[str, object],
    quantise: Callable[[str, torch.Tensor], Tensors],
    endings: tuple[str, ...],
) -> None:
    """Write a model as the hub has it; the weights whose names have these endings quantised."""
    model.save_pretrained(place)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(place / "model.safetensors").items():
        tensors |= quantise(name, tensor.float()) if name.endswith(endings) else {name: tensor}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def fp8(place: Path) -> PreTrainedModel:
    """Save and return a model in FP8."""
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).bfloat16()
    how = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    save(model, place, how, in_fp8, ("proj.weight",))
    return model


def mxfp4(place: Path) -> PreTrainedModel:
    """Save and return a model whose experts are in MXFP4."""
    config = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = GptOssForCausalLM(config).bfloat16()
    save(model, place, {"quant_method": "mxfp4"}, in_mxfp4, ("gate_up_proj", "down_proj"))
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("make", "most_wrong"), [(fp8, 0.04), (mxfp4, 0.15)])
def test_they_are_what_they_were_in_the_dtype_that_was_asked_for(
    make: Callable[[Path], PreTrainedModel], most_wrong: float, dtype: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted = dict(make(tmp_path).named_parameters())
    engine = EngineConfig(dtype=dtype, device="cpu", compile=False)
    config = ModelConfig(name="a", model=str(tmp_path), engine=engine)
    loaded = load_model(config)
    for name, parameter in loaded.module.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        difference = parameter.float() - wanted[name].float()
        assert difference.norm() <= most_wrong * wanted[name].float().norm()
    frequencies = [part for name, part in loaded.module.named_buffers() if "inv_freq" in name]
    assert {part.dtype for part in frequencies} == {torch.float32}
    assert weight_bytes(config) == pytest.approx(loaded.weight_bytes, rel=0.2)
