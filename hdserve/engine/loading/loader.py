"""Loading a stock transformers model for packed forwards, or refusing it with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from hdserve.config import EngineConfig, ModelConfig
from hdserve.core import SamplingParams
from hdserve.engine.attention.cpu_tree import max_attended_rows
from hdserve.engine.attention.packed import ATTENTION_NAME, number_layers
from hdserve.engine.forward.compiled import can_pack
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.hardware.devices import pick_device, pick_dtype
from hdserve.engine.linear.layers import prepare_linear_layers
from hdserve.engine.loading.kv_probe import OF_ITS_OWN, probe_kv_shape
from hdserve.engine.loading.quantisation import (
    OTHER_CHECKPOINT,
    convert_dequantised,
    is_quantised,
)
from hdserve.errors import ConfigError, HdserveError, InvalidRequest, UnsupportedModel
from hdserve.models import resolve_model
from hdserve.models.context import longest_context
from hdserve.models.hub import PICKLED, check_hub

logger = logging.getLogger(__name__)

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_STATEFUL_LAYERS = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}
_SCALES = ("weight_scale", "weight_scale_inv")
"""Of quantised weights; those of inputs are not needed, since they follow from the inputs."""

_MAX_LISTED = 5
_FORMAT_HINT = (
    " (weights in other formats are not loaded, because they can run code; `load_format: auto` "
    "allows them)"
)


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model of ``config`` with the ordinary transformers loaders.

    Raises:
        ConfigError: there is no such model, or no such device.
        UnsupportedModel: its architecture cannot be verified in packed draft trees, or its context
            is shorter than it is to be.
    """
    path = resolve_model(config.model)
    device = pick_device(config.engine.device)
    dtype = pick_dtype(config.engine.dtype, device)
    hf_config = read_architecture(config)
    if config.engine.max_model_len is not None:  # before minutes of loading
        _context_limit(hf_config.get_text_config(), config.engine.max_model_len)
    options = _hub_options(config)
    try:
        was_quantised = is_quantised(hf_config)
        generation = _generation_config(path, options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True if config.load_format == "safetensors" else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
        module: torch.nn.Module = loaded[0].to(device).eval()
        if was_quantised and not is_quantised(module.config):
            convert_dequantised(module, dtype)
    except HdserveError:
        raise
    except Exception as error:  # of transformers, or of the model's own code
        if error.args == (ATTENTION_NAME,):  # it looked its attention up in another table
            reason = f"its attention {OF_ITS_OWN}: {error}"
            raise UnsupportedModel(f"{hf_config.model_type} ({config.model}): {reason}") from error
        raise _not_loaded(config.model, error, _format_hint(config, path, error)) from error
    _check_weights(config.model, module, loaded[1])
    return prepare_model(module, config.engine, generation)


def read_architecture(config: ModelConfig) -> Any:
    """The configuration of transformers; its architecture is supported as far as that says.

    Raises:
        ConfigError: there is no such model, or transformers does not know it.
        UnsupportedModel: its architecture cannot be verified in packed draft trees.
    """
    check_hub(config.model, config.revision)
    try:
        found = AutoConfig.from_pretrained(resolve_model(config.model), **_hub_options(config))
    except Exception as error:  # of transformers, or of the model's own code
        raise _not_loaded(config.model, error) from error
    _check_architecture(found)
    if not _is_language_model(found):
        reason = (
            "transformers has no causal language model of this architecture; others are not served"
        )
        raise UnsupportedModel(f"{found.model_type} ({config.model}): {reason}")
    return found


def _not_loaded(model: str, error: Exception, hint: str = "") -> ConfigError:
    reason = error.args[0] if isinstance(error, KeyError) and error.args else error
    return ConfigError(f"cannot load the model {model!r}: {reason}{hint}")


def _format_hint(config: ModelConfig, path: str, error: Exception) -> str:
    """What may be done where there are weights, but in another format."""
    is_missing = config.load_format == "safetensors" and "safetensors" in str(error)
    is_there = not Path(path).is_dir() or any(Path(path).glob(PICKLED))
    return _FORMAT_HINT if is_missing and is_there else ""


def _is_language_model(config: Any) -> bool:
    """Whether transformers or the model's own code has a class to load it with."""
    own_code = getattr(config, "auto_map", None) or {}
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or AutoModelForCausalLM.__name__ in own_code


def _hub_options(config: ModelConfig) -> dict[str, Any]:
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _check_weights(model: str, module: torch.nn.Module, info: Mapping[str, Any]) -> None:
    """
    Args:
        info: what transformers reports of the checkpoint.

    Raises:
        ConfigError: weights are missing, which would be random, and different in each process; or
            it has biases that the configuration leaves out, or quantised weights whose scales
            transformers leaves out.
    """
    missing = sorted(info["missing_keys"])
    missing += [f"{key} ({error})" for key, error in sorted(_mismatched(info))]
    if missing:
        reason = "weights that its configuration asks for are not in the checkpoint"
        raise ConfigError(f"cannot load the model {model!r}: {reason}: {_listed(missing)}")
    unexpected = sorted(info["unexpected_keys"])
    biases = [key for key in unexpected if _is_bias_left_out(module, key)]
    if biases:
        reason = "its configuration leaves out biases that are in the checkpoint"
        raise ConfigError(f"cannot load the model {model!r}: {reason}: {_listed(biases)}")
    scales = [key for key in unexpected if _is_scale_left_out(module, key)]
    if scales:
        reason = f"transformers leaves out scales of quantised weights; use {OTHER_CHECKPOINT}"
        raise ConfigError(f"cannot load the model {model!r}: {reason}: {_listed(scales)}")
    if unexpected:
        logger.warning("%s: not of this architecture, and left out: %s", model, _listed(unexpected))


def _mismatched(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, found, wanted in info["mismatched_keys"]:
        yield key, f"{list(found)}, not {list(wanted)}"


def _is_bias_left_out(module: torch.nn.Module, key: str) -> bool:
    owner, _, name = key.rpartition(".")
    modules = dict(module.named_modules())
    return name == "bias" and owner in modules and getattr(modules[owner], "bias", key) is None


def _is_scale_left_out(module: torch.nn.Module, key: str) -> bool:
    owner, _, name = key.rpartition(".")
    return name in _SCALES and owner in dict(module.named_modules())


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _MAX_LISTED} more" if len(keys) > _MAX_LISTED else ""
    return ", ".join(keys[:_MAX_LISTED]) + more


def prepare_model(
    module: torch.nn.Module, config: EngineConfig, generation: Any = None
) -> LoadedModel:
    """Check a model that is in memory and describe it.

    Raises:
        UnsupportedModel: see :func:`load_model`.
    """
    hf_config: Any = cast("Any", module.config).get_text_config()
    _check_architecture(module.config)
    if getattr(type(module), "_is_stateful", False) and not _layer_types(hf_config):
        raise UnsupportedModel(
            f"{type(module).__name__} keeps a recurrent state, which cannot drop rejected tokens"
        )
    first = next(module.parameters())
    dtype, device = first.dtype, first.device
    vocab_size = int(cast("Any", module).get_output_embeddings().weight.shape[0])
    is_packed = config.compile is True and can_pack(module)
    prepare_linear_layers(module, config.exact is True and not is_packed)
    generation = generation or getattr(module, "generation_config", None)
    cast("Any", module).set_attn_implementation(ATTENTION_NAME)
    number_layers(module)
    kv_shape = probe_kv_shape(module, device)
    max_model_len = _max_model_len(hf_config, config.max_model_len)
    return LoadedModel(
        module=module,
        dtype=dtype,
        device=device,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        kv_shape=kv_shape,
        num_heads=int(hf_config.num_attention_heads),
        eos_token_ids=frozenset(
            token
            for token in _eos_token_ids(generation, module.config, hf_config)
            if token in range(vocab_size)
        ),
        max_attended_rows=max_attended_rows(kv_shape, dtype) if device.type == "cpu" else 0,
        default_sampling=_default_sampling(generation),
        weight_bytes=sum(map(_stored_bytes, (*module.parameters(), *module.buffers()))),
    )


def _stored_bytes(tensor: Any) -> int:
    """The bytes of a tensor; if an object represents it, as with quantised weights, those of the
    tensors in the object."""
    if not is_traceable_wrapper_subclass(tensor):
        return int(tensor.nbytes)
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


def _generation_config(path: str, options: Mapping[str, Any]) -> Any:
    """What the model's authors recommend; ``None`` if there is no such file, or none on this
    machine and no hub that answers.

    Raises:
        OSError: it is damaged.
    """
    found = cached_file(
        path,
        GENERATION_CONFIG_NAME,
        revision=options["revision"],
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,  # weights that are here load without access, too
    )
    return None if found is None else GenerationConfig.from_pretrained(Path(found).parent)


def _check_architecture(config: Any) -> None:
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not served")
    text = config.get_text_config()
    strange = _layer_types(text) - _SUPPORTED_LAYERS
    if strange:
        raise UnsupportedModel(
            f"{name}: layers of type {', '.join(sorted(strange))} are not served; "
            + (
                "their state cannot drop rejected tokens"
                if strange & _STATEFUL_LAYERS
                else "only full_attention and sliding_attention are"
            )
        )
    if getattr(text, "attn_temperature_tuning", False) and not all(text.no_rope_layers):
        raise UnsupportedModel(
            f"{name}: layers without rotary embeddings are not served with "
            "attn_temperature_tuning, which scales their queries by the row of a forward"
        )


def _layer_types(config: Any) -> set[str]:
    """The types of layers that the configuration names; it may name none although the model's class
    has recurrent layers."""
    return set(getattr(config, "layer_types", None) or ())


def _max_model_len(config: Any, wanted: int | None) -> int:
    """The context length: what is ``wanted``, or the model's limit.

    Raises:
        UnsupportedModel: as :func:`_context_limit`.
    """
    limit = _context_limit(config, wanted)
    if limit < int(config.max_position_embeddings):
        logger.warning("context limited to %d tokens: longer ones are scaled by the forward", limit)
    return wanted or limit


def _context_limit(config: Any, wanted: int | None) -> int:
    """The longest context; see :func:`longest_context`.

    Raises:
        UnsupportedModel: the configuration does not say it, or ``wanted`` is longer.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        reason = "its config does not say how long a context is (max_position_embeddings)"
        raise UnsupportedModel(f"{config.model_type}: {reason}")
    limit = longest_context(int(longest), getattr(config, "rope_parameters", None) or {})
    if wanted is not None and wanted > limit:
        raise UnsupportedModel(f"max_model_len {wanted} is over the {limit} tokens that are safe")
    return limit


def _eos_token_ids(*holders: Any) -> Iterable[int]:
    """The end-of-sequence ids of the first holder that names some."""
    for holder in holders:
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


def _default_sampling(generation: Any) -> dict[str, float]:
    """The sampling parameters that the model's authors recommend, if they recommend sampling.

    Raises:
        ConfigError: a value would not be allowed in a request.
    """
    names = ["repetition_penalty"]
    if getattr(generation, "do_sample", False):
        names += ["temperature", "top_p", "top_k", "min_p"]
    values = {name: getattr(generation, name, None) for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    if found.get("top_k") == -1:  # other servers' value for off
        found["top_k"] = 0
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ConfigError(f"generation_config.json: {error.message}") from error
    return found
