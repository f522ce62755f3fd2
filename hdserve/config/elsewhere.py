"""Other servers' names for the keys of a model."""

from __future__ import annotations

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    "enable_prefix_caching": "engine.prefix_caching",
    "enforce_eager": "engine.compile",
    "gpu_memory_utilization": "engine.kv_cache_tokens",
    "max_num_batched_tokens": "engine.prefill_chunk_tokens",
    "max_num_seqs": "engine.max_num_sequences",
    "served_model_name": "name",
    "speculative_config": "drafting",
}
"""Keys of ours, by vLLM's name of what is nearest to them."""
