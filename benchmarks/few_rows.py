"""What the few rows of a step cost: attention, products, choices, and forwards of a model.

    python benchmarks/few_rows.py --model hdserve-tiny

CPU time of one thread in ms, the best of interleaved rounds, beside PyTorch's own.  Every sequence
has a random draft tree and as many cached tokens as the table says.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from hdserve.bench.environment import commit, cpu_name
from hdserve.config import EngineConfig, ModelConfig
from hdserve.core import SamplingParams, Source
from hdserve.engine.attention.cpu_tree import CpuTreeAttention
from hdserve.engine.attention.packed import packed_attention
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.forward_batch import build_batch
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.batch.step_context import running
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.hardware.devices import has_amx_bf16, multiplies_bfloat16
from hdserve.engine.hardware.workers import Workers
from hdserve.engine.kernels.prepacked_tiles import MAX_STREAMS
from hdserve.engine.kernels.registers import HAS_AVX512_BF16
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.segments import align
from hdserve.engine.kv_cache.shape import KVShape, LayerShape
from hdserve.engine.linear.prepacked import multiply_prepacked, prepacked_kernel
from hdserve.engine.linear.prepacked_weights import prepack
from hdserve.engine.linear.skinny import multiply_rows
from hdserve.engine.loading.compilation import compile_model
from hdserve.engine.loading.loader import load_model
from hdserve.engine.sampling.sampler import choose_one
from hdserve.tree import DraftTree

CPU = torch.device("cpu")
NUM_HEADS, HEAD_SIZE = 4, 64
LAYERS = ((896, 4864), (4864, 896))
"""Inputs and outputs of layers of a feed-forward network of Qwen2.5-0.5B."""
NUM_LAYERS = 10
NUM_CACHED = 250
ATTENTION_CASES = ((1, 1), (1, 4), (1, 8), (1, 17), (1, 64), (4, 1), (16, 1), (16, 4))
ROW_COUNTS = (1, 2, 4, 8, 11, 16, 24, 32, 64, 256)
FORWARD_CASES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 11), (1, 17), (4, 1), (16, 1), (16, 4))
NUM_CHOICES = 100
TABLES = ("attention", "products", "choices", "forwards")
VOCAB_SIZES = (8192, 152_000)
CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
}

Work = Callable[[], object]


def best_ms(contenders: Mapping[str, Work], num_rounds: int) -> dict[str, float]:
    """Return the CPU time of each in milliseconds, the first call apart."""
    best = dict.fromkeys(contenders, float("inf"))
    for number in range(num_rounds + 1):
        for name, work in contenders.items():
            started = time.thread_time()
            work()
            if number:
                best[name] = min(best[name], 1e3 * (time.thread_time() - started))
    return best


def make_chunks(
    cache: KVCache, num_sequences: int, num_rows: int, num_cached: int
) -> Iterator[Chunk]:
    """Yield a chunk for each sequence, with a tree of ``num_rows`` nodes."""
    generator = random.Random(1)
    for _ in range(num_sequences):
        segment = cache.rows.allocate(num_cached + num_rows)
        assert segment is not None
        tree = DraftTree(5, num_rows - 1)
        for node in range(1, num_rows):
            tree.add_node(generator.randrange(node), 5 + node, Source.OTHER)
        yield Chunk(segment, num_cached, [5], tree)


def attention(
    num_sequences: int, num_rows: int, num_rounds: int, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Measure the attention of one layer, with what it takes to be called."""
    shape = KVShape((LayerShape(NUM_HEADS, HEAD_SIZE, HEAD_SIZE),))
    num_kv_rows = num_sequences * align(NUM_CACHED + num_rows)
    cache = KVCache(shape, num_kv_rows, dtype, CPU)
    chunks = [*make_chunks(cache, num_sequences, num_rows, NUM_CACHED)]
    workers = Workers()
    size = (1, NUM_HEADS, num_sequences * num_rows, HEAD_SIZE)
    query, key, value = (torch.randn(size).to(dtype) for _ in range(3))
    layer = SimpleNamespace(layer_idx=0)

    def attend(used: CpuTreeAttention | None) -> Work:
        plan = build_batch(chunks, cache, Shapes(is_exact=used is not None), used, workers)

        def work() -> None:
            with running(plan.plan):
                packed_attention(layer, query, key, value, None)  # type: ignore[arg-type]

        return work

    vectors = CpuTreeAttention(cache, workers, uses_amx=False, uses_bf16_dot=False)
    contenders = {"PyTorch": attend(None), "kernel": attend(vectors)}
    if HAS_AVX512_BF16 and dtype == torch.bfloat16:
        contenders["kernel, bf16 dot"] = attend(CpuTreeAttention(cache, workers, uses_amx=False))
    amx = CpuTreeAttention(cache, workers)
    if amx.uses_amx:
        contenders["kernel, AMX"] = attend(amx)
    return best_ms(contenders, num_rounds)


def products(num_inputs: int, num_outputs: int, num_rows: int, num_rounds: int) -> dict[str, float]:
    """Measure the products of ten large layers."""
    rows, workers = torch.randn(num_rows, num_inputs), Workers()
    weights = [torch.randn(num_outputs, num_inputs) for _ in range(NUM_LAYERS)]
    by_column = [weight.t().contiguous().t() for weight in weights]
    halves = [weight.bfloat16() for weight in weights]

    def library(stored: list[torch.Tensor], rows: torch.Tensor = rows) -> Work:
        return lambda: [F.linear(rows, weight) for weight in stored]

    def kernel(stored: list[torch.Tensor], rows: torch.Tensor = rows) -> Work:
        return lambda: [multiply_rows(rows, weight, workers) for weight in stored]

    contenders = {
        "PyTorch, rows": library(weights),
        "PyTorch, columns": library(by_column),
        "kernel": kernel(weights),
        "kernel, bfloat16": kernel(halves),
    }
    if multiplies_bfloat16(CPU):
        contenders["PyTorch, both bfloat16"] = library(halves, rows.bfloat16())
    for name, stored in (("", weights), (" bfloat16", halves)):
        if prepacked_kernel(stored[0].dtype) is None:
            continue
        for num_streams in range(1, MAX_STREAMS + 1):
            prepacked = [prepack(weight, num_streams) for weight in stored]
            contenders[f"kernel, prepacked{name}, streams: {num_streams}"] = partial(
                multiply_all, prepacked, rows.to(stored[0].dtype), num_outputs, workers
            )
    return best_ms(contenders, num_rounds)


def multiply_all(
    prepacked: list[torch.Tensor], rows: torch.Tensor, num_outputs: int, workers: Workers
) -> None:
    for weight in prepacked:
        multiply_prepacked(rows, weight, None, num_outputs, workers)


def choices(vocab_size: int, params: SamplingParams, num_rounds: int) -> dict[str, float]:
    """Measure a hundred choices from a row of logits each, one after the other."""
    logits = 2.5 * torch.randn(1, vocab_size)
    scattered = torch.stack([logits[0], logits[0]], dim=1)[:, :1].t()  # which no kernel reads

    def choose(row: torch.Tensor) -> Work:
        return lambda: [choose_one(row, params, number) for number in range(NUM_CHOICES)]

    return best_ms({"PyTorch": choose(scattered), "kernel": choose(logits)}, num_rounds)


def forwards(model: str, num_rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure forwards of a compiled model, with operators of Python, without, and exact."""
    engines = {
        "float32, Python": EngineConfig(exact=False, dtype="float32"),
        "float32": EngineConfig(exact=False, dtype="float32"),
        "float32, exact": EngineConfig(exact=True, dtype="float32"),
    }
    if has_amx_bf16(CPU, torch.bfloat16):
        exact = EngineConfig(exact=True, compile=True, dtype="bfloat16")
        engines |= {"bfloat16, AMX, exact, Python": exact, "bfloat16, AMX, exact": exact}
    runners = {}
    for name, engine in engines.items():
        loaded = load_model(ModelConfig(name=model, model=model, engine=engine))
        runner = ModelRunner(loaded, KVCache(loaded.kv_shape, 16 * 384, loaded.dtype, CPU))
        runner.compile_with(compile_model(loaded, uses_native="Python" not in name))
        runner.shapes = replace(runner.shapes, is_exact=engine.exact is True)
        runners[name] = runner
    for num_sequences, num_rows in FORWARD_CASES:
        contenders: dict[str, Work] = {}
        used = []
        for name, runner in runners.items():
            chunks = [*make_chunks(runner.cache, num_sequences, num_rows, NUM_CACHED)]
            contenders[name] = lambda runner=runner, chunks=chunks: runner.forward(chunks)  # type: ignore[misc]
            used += [(runner.cache, chunk.segment) for chunk in chunks]
        yield f"{num_sequences} x {num_rows}", best_ms(contenders, num_rounds)
        for cache, segment in used:
            cache.rows.free(segment)


def show(title: str, found: Iterable[tuple[str, dict[str, float]]]) -> None:
    columns = [*found]
    print(f"\n{title}\n")
    print("| ms |", " | ".join(name for name, _ in columns), "|")
    print("|---|" + "--:|" * len(columns))
    for contender in columns[0][1]:
        print(f"| {contender} |", " | ".join(f"{ms[contender]:.3f}" for _, ms in columns), "|")


def show_attention(rounds: int) -> None:
    cases = [
        (f"{count} x {rows}", attention(count, rows, rounds)) for count, rows in ATTENTION_CASES
    ]
    title = f"Attention, sequences x rows, {NUM_HEADS} heads of {HEAD_SIZE}, {NUM_CACHED} keys"
    show(title, cases)
    halves = (
        (f"{count} x {rows}", attention(count, rows, rounds, torch.bfloat16))
        for count, rows in (*ATTENTION_CASES, (1, 256))
    )
    show(f"{title}, bfloat16", halves)


def show_products(rounds: int) -> None:
    for sizes in LAYERS:
        show(
            f"Products of rows, {NUM_LAYERS} layers of {sizes[0]} x {sizes[1]}",
            ((str(count), products(*sizes, count, rounds)) for count in ROW_COUNTS),
        )


def show_choices(rounds: int) -> None:
    show(
        f"{NUM_CHOICES} choices at temperature 1, vocabulary",
        (
            (f"{vocab_size}, {name}", choices(vocab_size, SamplingParams(**options), rounds))
            for vocab_size in VOCAB_SIZES
            for name, options in CHOICES.items()
        ),
    )


def show_forwards(rounds: int, model: str) -> None:
    title = f"Forwards of {model}, sequences x rows, {NUM_CACHED} cached tokens each"
    show(title, forwards(model, rounds))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="hdserve-tiny")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    arguments = parser.parse_args()
    tables: tuple[Callable[[int], None], ...] = (
        *(show_attention, show_products, show_choices),
        partial(show_forwards, model=arguments.model),
    )
    torch.set_num_threads(1)
    print(f"commit {commit()}, {cpu_name()}, PyTorch {torch.__version__}")
    for name, table in zip(TABLES, tables, strict=True):
        if arguments.only in (None, name):
            table(arguments.rounds)


if __name__ == "__main__":
    main()
