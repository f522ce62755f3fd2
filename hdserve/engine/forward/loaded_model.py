"""A model as the engine runs it: a stock module, and what the engine has to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hdserve.engine.kv_cache.shape import KVShape


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for packed forwards.

    Attributes:
        module: the stock model, in evaluation mode.
        dtype: of computation and cache; that of the weights unless they are quantised.
        max_model_len: longest prompt and output together, tokens.
        eos_token_ids: every id that ends a sequence by the model's generation config, except ids
            that are not in the vocabulary.
        num_heads: of queries.
        max_attended_rows: rows of one sequence up to which the kernel attends on a CPU.
        default_sampling: sampling parameters of the generation config that differ from the
            OpenAI defaults, by our names.
    """

    module: torch.nn.Module
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    kv_shape: KVShape
    num_heads: int
    eos_token_ids: frozenset[int]
    max_attended_rows: int
    default_sampling: Mapping[str, float]
    weight_bytes: int
