"""Models whose weights are stored in fewer bits: loaded as they are, drafts change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from hdserve.config import EngineConfig, ModelConfig
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.repeated_layers import should_repeat
from hdserve.engine.loading.loader import load_model
from hdserve.errors import ConfigError
from tests.drafters import OracleDrafter
from tests.engines import make_engine, make_prompt, make_sequence, run

quantization = pytest.importorskip(
    "torchao.quantization", reason="needs hdserve[quantized]", exc_type=ModuleNotFoundError
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with int8 weights, in safetensors, as the hub has them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=None)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    whole, found = (tmp_path_factory.mktemp(name) for name in ("whole", "int8"))
    model.save_pretrained(whole)
    int8 = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantised = AutoModelForCausalLM.from_pretrained(
        whole, dtype=torch.bfloat16, quantization_config=int8
    )
    quantised.save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    engine = EngineConfig(dtype="bfloat16", compile=False)
    return load_model(ModelConfig(name="a", model=str(checkpoint), engine=engine))


def test_weights_stay_as_small_as_they_are_stored(loaded: LoadedModel) -> None:
    """A byte each and what scales them, not the two that their dtype says."""
    by_dtype = sum(2 * weights.numel() for weights in loaded.module.parameters())
    assert 0.5 * by_dtype < loaded.weight_bytes < 0.6 * by_dtype
    assert loaded.dtype == torch.bfloat16


def test_plain_output_is_that_of_the_library(loaded: LoadedModel, checkpoint: Path) -> None:
    prompt = make_prompt(20)
    seq = make_sequence("a", prompt, temperature=0.0, max_tokens=20)
    run(make_engine(model=loaded.module), [seq])
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    wanted = stock.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert seq.token_ids == wanted[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_nothing(loaded: LoadedModel, temperature: float) -> None:
    params = {"temperature": temperature, "seed": 3, "max_tokens": 40}
    plain, drafted = (make_sequence("a", make_prompt(20), **params) for _ in range(2))
    run(make_engine(model=loaded.module, exact=True), [plain])
    drafter = OracleDrafter({"a": plain.token_ids}, length=5)
    try:
        engine = make_engine([drafter], model=loaded.module, exact=True)
    except ConfigError as error:  # so it is with AMX
        pytest.skip(error.message)
    run(engine, [drafted])
    assert drafted.token_ids == plain.token_ids
    assert engine.stats.drafts.num_accepted_tokens > 0


def test_they_are_compiled_whole(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdserve.engine.forward.repeated_layers._MIN_LAYER_BYTES", 0)
    assert not should_repeat(loaded.module)
