"""How large the KV cache is, and what else needs memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hdserve.config import EngineConfig, ModelConfig
from hdserve.config.model import fewest_cache_tokens
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

_CPU_MEMORY_SHARE = 0.15
_GPU_MEMORY_SHARE = 0.85
"""The most of the free memory that the KV cache takes if the configuration does not say.  On a GPU
it leaves room for a forward."""

_GPU_WORKSPACE_BYTES = 1 << 30
"""What libraries take, and the activations that layers pass on."""

_NUM_CHOICE_TENSORS = 8
"""How many float64 tensors exist at the same time while tokens are sampled."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What is free beside the weights of a model.

    Attributes:
        num_bytes: of ``place``, which this engine may take.
        most_share: how much of it a KV cache takes at most if the configuration does not say.
        forward_bytes: how much of it forwards need; 0 on a CPU, where this is not known.
    """

    place: str
    num_bytes: float
    most_share: float
    forward_bytes: int = 0

    @property
    def cache_bytes(self) -> float:
        """What a KV cache takes if the configuration does not say."""
        most = self.num_bytes * self.most_share
        return max(0.0, min(most, self.num_bytes - self.forward_bytes))

    def has_room_for(self, cache_bytes: float) -> bool:
        """Whether forwards, as far as known, have room beside a cache of this size."""
        return not self.forward_bytes or cache_bytes <= self.num_bytes - self.forward_bytes

    def __str__(self) -> str:
        free = f"{_gib(self.num_bytes)} of {self.place} are free beside the weights"
        if not self.forward_bytes:
            return f"{free}, and a KV cache takes {self.most_share:.0%} of that at most"
        return f"{free}, and forwards need {_gib(self.forward_bytes)}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


_ADVICE = (
    "; a replica that finds other free memory has another limit, unless kv_cache_tokens is set"
)


def make_cache(
    model_config: ModelConfig,
    model: LoadedModel,
    max_draft_tokens: int,
    memory_share: float = 1.0,
) -> KVCache:
    """A KV cache as large as the configuration says, or as memory allows.

    Args:
        max_draft_tokens: most drafted tokens of a sequence, for which each has room in addition.
        memory_share: the part of a GPU's free memory that the engine may take if the configuration
            does not say how large its cache is.

    Raises:
        ConfigError: it cannot hold one sequence and its drafts, or does not fit into memory.
    """
    memory = _free_memory(model_config, model, max_draft_tokens, memory_share)
    wanted = num_cache_tokens(model_config.engine, model, max_draft_tokens, memory)
    if align(wanted) < model.max_model_len + max_draft_tokens:
        advice = "" if model_config.engine.kv_cache_tokens else _ADVICE
        num_tokens = align(wanted) - max_draft_tokens
        logger.warning("the KV cache limits the context to %d tokens%s", num_tokens, advice)
    try:
        return KVCache(model.kv_shape, wanted, model.dtype, model.device)
    except RuntimeError as error:  # also raised when a GPU is out of memory
        raise ConfigError(f"a KV cache of {wanted} tokens does not fit: {error}") from error


def num_cache_tokens(
    config: EngineConfig, model: LoadedModel, max_draft_tokens: int, memory: FreeMemory
) -> int:
    """The size of the KV cache.

    Raises:
        ConfigError: it cannot hold one sequence and its drafts, or forwards have no room beside it.
    """
    bytes_per_token = model.kv_shape.bytes_per_token(model.dtype)
    wanted = config.kv_cache_tokens
    if wanted is None:
        affordable = int(memory.cache_bytes // bytes_per_token)
        if affordable < fewest_cache_tokens(max_draft_tokens):
            advice = "set kv_cache_tokens"
            if memory.forward_bytes:
                advice = "lower max_num_sequences, or raise num_gpus if it is a part of one"
            raise ConfigError(
                f"too little memory is left for a KV cache: {memory}; lower max_draft_tokens, or "
                + advice
            )
        longest = align(model.max_model_len + max_draft_tokens)
        return min(config.max_num_sequences * longest, affordable)
    if fault := config.cache_fault(max_draft_tokens):
        raise ConfigError(fault)
    num_bytes = wanted * bytes_per_token
    if not memory.has_room_for(num_bytes):
        raise ConfigError(
            f"a KV cache of {wanted} tokens does not fit: it takes {_gib(num_bytes)}, {memory}; "
            "lower kv_cache_tokens, max_num_sequences or max_draft_tokens"
        )
    if num_bytes > memory.num_bytes:
        told = "a KV cache of %d tokens takes %s, and %s of %s are free: lower kv_cache_tokens"
        logger.warning(told, wanted, _gib(num_bytes), _gib(memory.num_bytes), memory.place)
    return wanted


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


def _free_memory(
    config: ModelConfig, model: LoadedModel, max_draft_tokens: int, memory_share: float
) -> FreeMemory:
    if model.device.type == "cpu":
        return FreeMemory("memory", free_bytes(model.device), _CPU_MEMORY_SHARE)
    needed = forward_bytes(model, config.engine.max_num_sequences, max_draft_tokens)
    if config.engine.kv_cache_tokens is not None:  # which may be more than the engine's share
        return FreeMemory("the GPU", free_bytes(model.device), _GPU_MEMORY_SHARE, needed)
    gpu_share = config.num_gpus or 1.0
    free = free_bytes(model.device, gpu_share) * memory_share
    place = "the GPU" if gpu_share * memory_share == 1.0 else "this engine's share of the GPU"
    return FreeMemory(place, free, _GPU_MEMORY_SHARE, needed)
