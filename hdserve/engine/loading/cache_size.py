"""How large the KV cache is, and what else needs memory."""

from __future__ import annotations

import logging

from hdserve.config import ModelConfig
from hdserve.engine.forward.cuda_graphs import MAX_GRAPH_LOGITS
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.static_batches import CAPTURE_SHAPES
from hdserve.engine.hardware.memory import free_bytes
from hdserve.engine.kernels.splits import MAX_SPLITS, QUERIES
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import align
from hdserve.engine.sampling.batched_choices import MAX_LOGITS
from hdserve.engine.sampling.logits_processor import LogitsProcessor
from hdserve.errors import ConfigError

logger = logging.getLogger(__name__)

_MIN_SEQUENCE_TOKENS = 2
"""A prompt of one token and one generated token."""

_CPU_MEMORY_SHARE = 0.15
_GPU_MEMORY_SHARE = 0.85
"""The share of the free memory that the KV cache takes if the configuration does not say.  On a
GPU it leaves room for a forward."""

_GPU_WORKSPACE_BYTES = 1 << 30
"""What libraries take, and the activations that layers pass on."""

_NUM_CHOICE_TENSORS = 8
"""How many float64 tensors exist at the same time while tokens are sampled."""


def make_cache(model_config: ModelConfig, model: LoadedModel, max_draft_tokens: int) -> KVCache:
    """A KV cache as large as the configuration says, or as memory allows.

    Args:
        max_draft_tokens: most drafted tokens of a sequence, for which each has room in addition.

    Raises:
        ConfigError: it cannot hold one sequence and its drafts, or does not fit into memory.
    """
    config = model_config.engine
    longest = align(model.max_model_len + max_draft_tokens)
    wanted = config.kv_cache_tokens
    if wanted is None:
        spare = _bytes_for_cache(model_config, model, max_draft_tokens)
        affordable = int(spare // model.kv_shape.bytes_per_token(model.dtype))
        wanted = min(config.max_num_sequences * longest, affordable)
    if wanted < _MIN_SEQUENCE_TOKENS + max_draft_tokens:
        raise ConfigError(
            f"a KV cache of {wanted} tokens has no room for one draft tree of "
            f"{max_draft_tokens}; raise kv_cache_tokens, or lower max_draft_tokens"
        )
    if align(wanted) < model.max_model_len + max_draft_tokens:
        num_tokens = align(wanted) - max_draft_tokens
        logger.warning("the KV cache limits the context to %d tokens", num_tokens)
    try:
        return KVCache(model.kv_shape, wanted, model.dtype, model.device)
    except RuntimeError as error:  # also raised when a GPU is out of memory
        raise ConfigError(f"a KV cache of {wanted} tokens does not fit: {error}") from error


def forward_bytes(model: LoadedModel, max_num_sequences: int, max_draft_tokens: int) -> int:
    """What a GPU needs besides weights and KV cache.  Mostly logits: those of the largest forward,
    in the model's dtype and once more in float32 or scaled; those of all CUDA graphs; and copies
    while tokens are sampled.  Then the penalties of all sequences, and attention's scratch."""
    num_rows = CAPTURE_SHAPES.pad_rows(max_num_sequences * (1 + max_draft_tokens))
    of_forward = num_rows * model.vocab_size * (model.dtype.itemsize + 4)
    of_graphs = 2 * MAX_GRAPH_LOGITS * model.vocab_size * 4
    of_choices = _NUM_CHOICE_TENSORS * MAX_LOGITS * 8
    of_logits_processors = max_num_sequences * model.vocab_size * LogitsProcessor.BYTES_PER_TOKEN
    of_all = of_forward + of_graphs + of_choices + of_logits_processors + _attention_bytes(model)
    return of_all + _GPU_WORKSPACE_BYTES


def _attention_bytes(model: LoadedModel) -> int:
    """The bytes of the partial results of attention in a forward, in float32."""
    longest = max(layer.value_size for layer in model.kv_shape.layers)
    width = (1 << (longest - 1).bit_length()) + 2
    return MAX_SPLITS * QUERIES * model.num_heads * width * 4


def _bytes_for_cache(config: ModelConfig, model: LoadedModel, max_draft_tokens: int) -> float:
    if model.device.type == "cpu":
        return free_bytes(model.device) * _CPU_MEMORY_SHARE
    gpu_share = config.num_gpus or 1.0
    free = free_bytes(model.device, gpu_share)
    needed = forward_bytes(model, config.engine.max_num_sequences, max_draft_tokens)
    return max(0.0, min(free * _GPU_MEMORY_SHARE, free - needed))
