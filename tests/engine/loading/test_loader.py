"""What is loaded, with which limits and defaults, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForCausalLM,
)

from hdserve.config import DraftingConfig, EngineConfig, ModelConfig
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.loading.loader import load_model, prepare_model
from hdserve.errors import ConfigError, UnsupportedModel
from hdserve.models import context_length
from tests.drafters import JunkDrafter
from tests.engine.caches import equal_layers
from tests.engines import make_engine, make_prompt, make_sequence, run
from tests.models import MAX_POSITIONS, VOCAB_SIZE, make_model

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": None,
}
OPENING_CONTEXT = 64


def _mamba() -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    return MambaForCausalLM(MambaConfig(**sizes))


def _rwkv() -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
    return RwkvForCausalLM(RwkvConfig(**sizes, context_length=64))


def _recurrent_gemma() -> PreTrainedModel:
    blocks = ["recurrent", "attention"]
    config = RecurrentGemmaConfig(**SMALL, attention_window_size=16, block_types=blocks)
    return RecurrentGemmaForCausalLM(config)


def _jamba() -> PreTrainedModel:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    return JambaForCausalLM(JambaConfig(**SMALL, **layers, mamba_d_state=4))


def _llama4(**options: Any) -> PreTrainedModel:
    sizes = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
    return Llama4ForCausalLM(Llama4TextConfig(**SMALL, **sizes, **options, attention_chunk_size=16))


def _granite4(layer_types: list[str]) -> PreTrainedModel:
    """Of a class that knows recurrent layers, whether it has some or none."""
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48}
    mamba = {"mamba_n_heads": 8, "mamba_d_state": 4}
    config = GraniteMoeHybridConfig(**SMALL, **experts, **mamba, layer_types=layer_types)
    return GraniteMoeHybridForCausalLM(config)


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4))


def _mpt() -> PreTrainedModel:
    return MptForCausalLM(MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layers=2, n_heads=4))


def _whisper() -> PreTrainedModel:
    """Its decoder alone."""
    layers = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = WhisperConfig(vocab_size=VOCAB_SIZE, d_model=32, **layers, **tokens)
    return WhisperForCausalLM(config)


def _t5() -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, num_heads=4))


def _gpt_j() -> PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    return GPTJForCausalLM(GPTJConfig(vocab_size=VOCAB_SIZE, **sizes))


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "mamba": (_mamba, "cannot drop rejected tokens"),
    "rwkv": (_rwkv, "cannot drop rejected tokens"),
    "recurrent_gemma": (_recurrent_gemma, "cannot drop rejected tokens"),
    "jamba": (_jamba, "cannot drop rejected tokens"),
    "granite4": (lambda: _granite4(["mamba", "attention"]), "cannot drop rejected tokens"),
    "llama4": (
        _llama4,
        "of type chunked_attention are not served; only full_attention and sliding_attention are",
    ),
    "bloom": (_bloom, "does not go through the attention interface"),
    "mpt": (_mpt, "does not go through the attention interface"),
    "whisper": (_whisper, "does not say how long a context is"),
    "t5": (_t5, "encoder-decoder models are not served"),
}


def save(model: PreTrainedModel, path: Path, generation: dict[str, Any] | None = None) -> Path:
    model.save_pretrained(path)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load(path: Path | str, **engine: Any) -> LoadedModel:
    options = EngineConfig(**{"dtype": "float32", **engine})
    return load_model(ModelConfig(name="a", model=str(path), engine=options))


def llama(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **options))


# --- architectures ---


@pytest.mark.parametrize("name", REFUSED)
def test_other_architectures_are_refused(name: str) -> None:
    """A model that cannot drop rejected tokens, or is of another kind, is refused: it says why."""
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=reason):
        prepare_model(make().eval(), EngineConfig())


@pytest.mark.parametrize("name", ["mamba", "jamba", "t5"])
def test_other_architectures_are_refused_from_disk(name: str, tmp_path: Path) -> None:
    """The same from a directory, before the weights are read."""
    make, reason = REFUSED[name]
    path = save(make(), tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=reason):
        load(path)


def test_queries_that_are_scaled_by_their_row_are_refused() -> None:
    """As Llama 4 scales those of layers without rotary embeddings; a model without such layers
    scales none."""
    options = {"layer_types": ["full_attention"] * 2}
    scaled = _llama4(no_rope_layers=[1, 0], **options).eval()
    with pytest.raises(UnsupportedModel, match="llama4_text: layers without rotary embeddings"):
        prepare_model(scaled, EngineConfig())
    for rotated in ({"no_rope_layers": [1, 1]}, {"attn_temperature_tuning": False}):
        model = _llama4(**rotated, **options).eval()
        assert prepare_model(model, EngineConfig()).max_model_len == MAX_POSITIONS


def test_a_class_with_recurrent_layers_is_served_where_a_model_has_none() -> None:
    """As GraniteMoeHybrid may have attention alone; what is drafted changes nothing."""
    torch.manual_seed(0)
    model = _granite4(["attention", "attention"]).double().eval()
    prompt = make_prompt(40)
    plain = model.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    drafted = make_sequence("a", prompt, ignore_eos=True, temperature=0.0)
    run(make_engine([JunkDrafter(VOCAB_SIZE)], model=model), [drafted])
    assert drafted.token_ids == plain[0].tolist()


def test_a_model_with_eyes_is_loaded_for_text(tmp_path: Path) -> None:
    """What its configuration says of text lies within that of the whole."""
    loaded = load(save(make_model("gemma4", torch.float32), tmp_path))
    assert loaded.max_model_len == MAX_POSITIONS
    assert loaded.kv_shape.num_layers == 4
    assert loaded.vocab_size == VOCAB_SIZE


def test_a_model_with_eyes_ends_where_its_whole_configuration_says() -> None:
    """Unless its generation config names tokens, too."""
    model = make_model("gemma4", torch.float32)
    assert model.config.get_text_config().eos_token_id is None
    model.config.eos_token_id, model.generation_config = [5, 9], None
    assert prepare_model(model.eval(), EngineConfig()).eos_token_ids == {5, 9}


def test_attention_that_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    """A model class with its own table of attention functions is refused while it loads."""
    with pytest.raises(UnsupportedModel, match=r"^gptj .*attention interface of"):
        load(save(_gpt_j(), tmp_path))


def test_what_is_no_language_model_is_told_without_a_list_of_all_there_are(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    ViTModel(ViTConfig(**sizes, intermediate_size=48)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"^vit \(.*no causal language model of this arch"):
        load(tmp_path)


# --- paths, devices, types ---


def test_bad_paths_are_errors_of_the_configuration(tmp_path: Path) -> None:
    """A path that is not there, an empty directory, and a broken or missing file of weights are
    one error that names the model."""
    broken = save(llama(), tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    missing = save(llama(), tmp_path / "missing")
    (missing / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty", broken, missing):
        with pytest.raises(ConfigError, match="cannot load the model") as caught:
            load(path)
        assert str(path) in caught.value.message


def resave(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The same checkpoint with other weights in it."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_checkpoint_without_some_weights_is_refused(name: str, tmp_path: Path) -> None:
    """They would be random, and others in each process."""
    path = save(llama(tie_word_embeddings=False), tmp_path)
    with pytest.raises(ConfigError, match=f"are not in the checkpoint: {re.escape(name)}"):
        load(resave(path, lambda weights: weights.pop(name)))


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    path = save(llama(), tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=re.escape(name)):
        load(resave(path, lambda weights: weights.update({name: torch.zeros(7, 32)})))


def test_biases_that_the_configuration_leaves_out_are_refused(tmp_path: Path) -> None:
    """The model would answer, as another."""
    path = save(llama(attention_bias=True), tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(ConfigError, match=r"leaves out biases .*\.bias and \d more"):
        load(path)


def test_weights_of_no_use_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Heads of another task among them; the model is what it says it is."""
    path = save(llama(), tmp_path)
    loaded = load(resave(path, lambda weights: weights.update({"score.weight": torch.ones(2, 32)})))
    assert loaded.vocab_size == VOCAB_SIZE
    assert "not of this architecture, and left out: score.weight" in caplog.text


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    """Weights of another format are no remedy, and are not there."""
    llama().save_pretrained(tmp_path, max_shard_size="50KB")
    shard = max(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name) as caught:
        load_model(ModelConfig(name="a", model=str(tmp_path)))
    assert "load_format" not in caught.value.message


def test_an_unknown_rotary_embedding_is_no_fault_of_the_attention(tmp_path: Path) -> None:
    """As the text part of Qwen2-VL has it."""
    llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_type"] = "mrope"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"cannot load the model .*: mrope$"):
        load_model(ModelConfig(name="m", model=str(tmp_path)))


def test_pickled_weights_are_loaded_only_on_request(tmp_path: Path) -> None:
    """They can run code; the error says what to set."""
    module = llama()
    path = save(module, tmp_path)
    (path / "model.safetensors").unlink()
    torch.save(module.state_dict(), path / "pytorch_model.bin")
    config = ModelConfig(name="a", model=str(path), engine=EngineConfig(dtype="float32"))
    with pytest.raises(ConfigError, match="load_format: auto"):
        load_model(config)
    loaded = load_model(config.model_copy(update={"load_format": "auto"}))
    for name, weight in module.named_parameters():
        path_to, _, own = name.rpartition(".")
        assert torch.equal(getattr(loaded.module.get_submodule(path_to), own), weight)


def test_code_of_a_model_runs_only_on_request(tmp_path: Path) -> None:
    """What comes with a model is not even imported; the error says what to set."""
    path, mark = save(llama(), tmp_path), tmp_path / "ran"
    (path / "own.py").write_text(
        f"""from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({str(mark)!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
    )
    fields = json.loads((path / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (path / "config.json").write_text(json.dumps({**fields, "model_type": "own", "auto_map": own}))
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load(path)
    assert not mark.exists()


def test_code_of_a_model_that_needs_a_missing_package_is_told(tmp_path: Path) -> None:
    path = save(llama(), tmp_path)
    (path / "own.py").write_text("import nothing_here\n")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (path / "config.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"cannot load the model .*nothing_here"):
        load_model(ModelConfig(name="m", model=str(path), trust_remote_code=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error(tmp_path: Path) -> None:
    """``cuda`` without such a device is refused; ``auto`` takes the CPU."""
    path = save(llama(), tmp_path)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        load(path, device="cuda")
    assert load(path, device="auto").device.type == "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_type_is_the_configured_one(dtype: str, tmp_path: Path) -> None:
    """Weights come in the type that was asked for, and the model runs in it."""
    loaded = load(save(llama(), tmp_path), dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {loaded.dtype}
    config = ModelConfig(name="a", model="a", engine=EngineConfig(exact=False, kv_cache_tokens=64))
    seq = make_sequence("a", make_prompt(5), temperature=0.0, max_tokens=6)
    run(build_engine(config, loaded, ()), [seq])
    assert seq.num_output_tokens == 6


def test_automatic_type_is_one_the_hardware_multiplies(tmp_path: Path) -> None:
    """``auto`` is bfloat16 or float32, whatever the file holds."""
    path = save(llama().to(torch.float16), tmp_path)
    assert load(path, dtype="auto").dtype in {torch.bfloat16, torch.float32}


def test_sizes_are_read_off_the_model() -> None:
    """Vocabulary, cache shape and bytes are those of the model in memory."""
    model = make_model("llama", torch.float32)
    loaded = prepare_model(model, EngineConfig())
    assert loaded.vocab_size == VOCAB_SIZE
    assert loaded.max_model_len == MAX_POSITIONS
    assert loaded.kv_shape == equal_layers(2, 2, 8, 8)
    stored = [*model.parameters(), *model.buffers()]
    assert loaded.weight_bytes == sum(4 * tensor.numel() for tensor in stored)


# --- generation config ---


def test_generation_defaults_are_those_of_the_authors(tmp_path: Path) -> None:
    """What the generation config recommends is the default of requests; what it does not say is
    not made up."""
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 5]}
    loaded = load(save(llama(eos_token_id=9), tmp_path, generation))
    assert loaded.default_sampling == {"temperature": 0.6, "top_p": 0.9}
    assert loaded.eos_token_ids == {3, 5}


def test_greedy_authors_recommend_nothing(tmp_path: Path) -> None:
    """Sampling values beside ``do_sample: false`` are leftovers, no recommendation; but a penalty
    is as well of greedy answers."""
    generation = {"do_sample": False, "temperature": 0.6, "eos_token_id": 7}
    loaded = load(save(llama(), tmp_path / "a", generation))
    assert loaded.default_sampling == {}
    assert loaded.eos_token_ids == {7}
    penalised = load(save(llama(), tmp_path / "b", {**generation, "repetition_penalty": 1.3}))
    assert penalised.default_sampling == {"repetition_penalty": 1.3}


def test_defaults_that_no_request_could_have_are_refused(tmp_path: Path) -> None:
    """At once, and not with each request, whose fault it would seem."""
    generation = {"do_sample": True, "top_k": -1, "top_p": 0.9}
    off = load(save(llama(), tmp_path / "off", generation))
    assert off.default_sampling == {"top_k": 0, "top_p": 0.9}
    wrong = save(llama(), tmp_path / "wrong", {**generation, "top_p": 1.5})
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p"):
        load(wrong)


def test_ends_without_a_generation_config(tmp_path: Path) -> None:
    """Without a generation config the model's config says what ends a sequence; or nothing does."""
    for number, eos in enumerate((9, [4, 8], None)):
        path = save(llama(eos_token_id=eos), tmp_path / str(number))
        (path / "generation_config.json").unlink()
        wanted = set() if eos is None else {9} if eos == 9 else {4, 8}
        assert load(path).eos_token_ids == wanted


def test_a_damaged_generation_config_is_not_taken_for_none(tmp_path: Path) -> None:
    path = save(llama(), tmp_path)
    (path / "generation_config.json").write_text('{"do_sample": tr')
    with pytest.raises(ConfigError, match=r"cannot load the model .*generation_config\.json"):
        load(path)


def test_ends_that_are_no_tokens_of_the_model_end_nothing() -> None:
    """Nor do they fail where ``min_tokens`` forbids the ends."""
    model = make_model()
    model.generation_config.eos_token_id = [-1, 3, VOCAB_SIZE, 10**6]
    assert prepare_model(model, EngineConfig()).eos_token_ids == {3}
    seq = make_sequence("a", make_prompt(5), min_tokens=3, max_tokens=3)
    run(make_engine(model=model), [seq])
    assert seq.num_output_tokens == 3


# --- context ---

ROPE: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, MAX_POSITIONS),
    "linear": ({"rope_type": "linear", "factor": 2.0}, MAX_POSITIONS),
    "yarn": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
        MAX_POSITIONS,
    ),
    "yarn as a model card has it": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_POSITIONS},
        4 * MAX_POSITIONS,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 128,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        MAX_POSITIONS,
    ),
    "dynamic": (
        {
            "rope_type": "dynamic",
            "factor": 2.0,
            "original_max_position_embeddings": OPENING_CONTEXT,
        },
        OPENING_CONTEXT,
    ),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": "2"},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["new"] * 2},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
        {"hidden_act": "none"},
        {"torch_dtype": "none", "dtype": None},
    ],
    ids=str,
)
def test_a_configuration_that_is_none_is_told(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Whatever transformers raises."""
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises((ConfigError, UnsupportedModel), match=r"cannot load|are not served|layer"):
        load_model(ModelConfig(name="m", model=str(tmp_path)))


@pytest.mark.parametrize("name", ROPE)
def test_the_context_ends_where_sequences_would_meet(name: str) -> None:
    """Rotary embeddings that look at the longest position of a forward limit the context to where
    they do not; the others do not."""
    rope, limit = ROPE[name]
    model = llama(rope_parameters={"rope_theta": 10000.0, **rope})
    assert prepare_model(model, EngineConfig()).max_model_len == limit


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPE)
def test_a_context_is_the_same_before_a_model_is_loaded(
    name: str, key: str, tmp_path: Path
) -> None:
    """As transformers writes a configuration now, and as cards of older models have it."""
    rope, limit = ROPE[name]
    if key == "rope_scaling":
        rope = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
    place = save(llama(), tmp_path) / "config.json"
    content = json.loads(place.read_text())
    del content["rope_parameters"]
    place.write_text(json.dumps({**content, key: {"rope_theta": 10000.0, **rope}}))
    assert context_length(str(tmp_path)) == limit
    assert load(tmp_path).max_model_len == limit


def test_a_context_that_is_limited_beside_the_rotations(tmp_path: Path) -> None:
    longrope_model().save_pretrained(tmp_path)
    assert context_length(str(tmp_path)) == OPENING_CONTEXT


def test_a_configured_context_must_fit() -> None:
    """``max_model_len`` shortens the context and never lengthens it."""
    model = llama()
    assert prepare_model(model, EngineConfig(max_model_len=100)).max_model_len == 100
    with pytest.raises(UnsupportedModel, match="over the 256 tokens"):
        prepare_model(model, EngineConfig(max_model_len=MAX_POSITIONS + 1))
    with pytest.raises(UnsupportedModel, match="over the 64 tokens"):
        prepare_model(longrope_model(), EngineConfig(max_model_len=OPENING_CONTEXT + 1))


def test_a_context_that_is_too_long_is_told_before_the_weights_are_read(tmp_path: Path) -> None:
    (save(llama(), tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="max_model_len 257 is over the 256 tokens"):
        load(tmp_path, max_model_len=MAX_POSITIONS + 1)
    with pytest.raises(ConfigError, match="cannot load the model"):
        load(tmp_path, max_model_len=MAX_POSITIONS)


def longrope_model() -> PreTrainedModel:
    """A model whose rotations change for all sequences once one of them is long."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    config = Phi3Config(
        **SMALL, rope_parameters=rope, original_max_position_embeddings=OPENING_CONTEXT
    )
    model = Phi3ForCausalLM(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def answers_with_a_long_neighbour(make: Callable[[], Engine], num_long: int) -> list[list[int]]:
    """The answer to a short prompt, alone and beside a long one."""
    found = []
    for neighbours in ([], [make_sequence("long", make_prompt(num_long), max_tokens=8)]):
        seq = make_sequence("short", make_prompt(4, 1), temperature=0.0, max_tokens=24)
        run(make(), [seq, *neighbours])
        found.append(seq.output_token_ids)
    return found


def test_a_long_neighbour_changes_nothing() -> None:
    """With ``longrope`` a short sequence packed with one as long as is allowed gives what it gives
    alone; beyond the limit it would not."""
    options: dict[str, Any] = {"exact": False, "prefill_chunk_tokens": 256}
    alone, beside = answers_with_a_long_neighbour(
        lambda: make_engine(model=longrope_model(), **options), OPENING_CONTEXT - 8
    )
    assert alone == beside

    def beyond() -> Engine:
        config = ModelConfig(
            name="a",
            model="a",
            engine=EngineConfig(**options, kv_cache_tokens=512),
            drafting=DraftingConfig(max_draft_tokens=0),
        )
        loaded = prepare_model(longrope_model(), config.engine)
        return build_engine(config, dataclasses.replace(loaded, max_model_len=200), ())

    alone, beside = answers_with_a_long_neighbour(beyond, 150)
    assert alone != beside
