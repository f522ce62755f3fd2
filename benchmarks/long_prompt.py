"""Memory and other streams while a very long prompt goes through.

    python benchmarks/long_prompt.py --prompt-tokens 131000

A model of random weights (2 layers, width 64, 131,072 positions) decodes a short sequence; then a
long prompt comes beside it.  Prints the process's peak memory beyond weights and KV cache, and the
time between the short sequence's tokens before and meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hdserve.bench.contenders import peak_memory_bytes, reset_peak_memory
from hdserve.bench.environment import commit, cpu_name
from hdserve.config import EngineConfig, ModelConfig
from hdserve.core import SamplingParams, Sequence
from hdserve.drafting.base import DraftResources
from hdserve.drafting.registry import build_drafters
from hdserve.engine.build import build_engine
from hdserve.engine.engine import Engine
from hdserve.engine.loading.loader import prepare_model

VOCAB_SIZE = 8192
MAX_POSITIONS = 131072
NUM_STEPS_BEFORE = 200


def make_engine(num_kv_tokens: int) -> Engine:
    torch.manual_seed(0)
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_POSITIONS,
            eos_token_id=None,
        )
    ).eval()
    engine = EngineConfig(
        exact=False,
        max_num_sequences=2,
        kv_cache_tokens=num_kv_tokens,
        prefill_chunk_tokens=256,
        num_threads=1,
    )
    config = ModelConfig(name="long", model="long", engine=engine)
    drafters = build_drafters(config.drafting, DraftResources(vocab_size=VOCAB_SIZE))
    return build_engine(config, prepare_model(module, engine), drafters)


def make_sequence(name: str, length: int, max_tokens: int) -> Sequence:
    generator = torch.Generator().manual_seed(length)
    prompt = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return Sequence(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=131000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_kv_tokens = arguments.prompt_tokens + MAX_POSITIONS // 8
    engine = make_engine(num_kv_tokens)
    short = make_sequence("short", 32, MAX_POSITIONS // 8 - 64)
    engine.add(short)
    before_ms = [_step(engine) for _ in range(NUM_STEPS_BEFORE)][10:]
    reset_peak_memory()
    rest_bytes = peak_memory_bytes(torch.device("cpu"))
    long = make_sequence("long", arguments.prompt_tokens, 4)
    engine.add(long)
    started = time.perf_counter()
    meanwhile_ms = []
    while not long.num_output_tokens:
        meanwhile_ms.append(_step(engine))
    assert short.finish_reason is None, "it was decoded until the long prompt was read"
    print(
        json.dumps(
            {
                "hardware": cpu_name(),
                "commit": commit(),
                "prompt_tokens": arguments.prompt_tokens,
                "prefill_s": round(time.perf_counter() - started, 1),
                "steps": len(meanwhile_ms),
                "peak_beyond_rest_mb": round(
                    (peak_memory_bytes(torch.device("cpu")) - rest_bytes) / 1e6
                ),
                "step_ms_before": round(statistics.median(before_ms), 2),
                "step_ms_meanwhile": {
                    "median": round(statistics.median(meanwhile_ms), 2),
                    "max": round(max(meanwhile_ms), 2),
                },
            },
            indent=1,
        )
    )


def _step(engine: Engine) -> float:
    """Return the milliseconds of a step."""
    started = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - started)


if __name__ == "__main__":
    main()
