"""Weights whose scales transformers would leave out are refused: the model would say nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.loading.loader import load_model
from hdserve.errors import ConfigError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
MODEL_OPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def saved(place: Path, quantization: dict[str, str] | None, scale: str | None) -> Path:
    """Save a Llama, its matrices in FP8 with one scale each as ModelOpt does; without the name of a
    scale, as it is.  All of its layers have scales of inputs, keys and values, too."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        layer = name.removesuffix(".weight")
        tensors[f"{layer}.input_scale"] = torch.tensor(0.5)
        if layer.endswith(("k_proj", "v_proj")):
            tensors[f"{layer}.{layer[-6]}_scale"] = torch.tensor(0.5)
        if scale is not None:
            largest = tensors[name].abs().amax().float() / LARGEST_FP8
            tensors[name] = (tensors[name] / largest).to(torch.float8_e4m3fn)
            tensors[f"{layer}.{scale}"] = largest
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((place / "config.json").read_text())
        config["quantization_config"] = quantization
        (place / "config.json").write_text(json.dumps(config))
    return place


def load(place: Path) -> LoadedModel:
    engine = EngineConfig(device="cpu", compile=False)
    return load_model(ModelConfig(name="a", model=str(place), engine=engine))


def test_a_method_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load weights quantised as 'modelopt'; use anoth"):
        load(saved(tmp_path, MODEL_OPT, "weight_scale"))


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_scales_that_the_configuration_does_not_tell_of_are_refused(
    tmp_path: Path, scale: str
) -> None:
    """As of older exports."""
    with pytest.raises(ConfigError, match=rf"leaves out scales .*\.{scale}, .* and \d+ more"):
        load(saved(tmp_path, None, scale))


def test_other_scales_are_not_needed(tmp_path: Path) -> None:
    """Those of inputs, keys and values: what is computed with ordinary numbers needs none."""
    assert load(saved(tmp_path, None, None)).vocab_size == SIZES["vocab_size"]
