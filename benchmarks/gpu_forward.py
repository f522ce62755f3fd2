"""How long forwards take on a GPU, beside reading the weights, and where their time goes.

    python -m benchmarks.gpu_forward --shape llama-2-7b

Weights are noise, in bfloat16; forwards are CUDA graphs of the compiled model, as a server has them
(docs/results/engine-gpu.md).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hdserve.bench.random_weights import random_host
from hdserve.config import DraftingConfig, EngineConfig, ModelConfig
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.forward.loaded_model import LoadedModel
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.loading.compilation import compile_model
from hdserve.engine.loading.forward_cost import binary_tree

CACHE_TOKENS = 32_768
MAX_DRAFT_TOKENS = 31
POINTS = (
    (1, 1, 200),
    (1, 2, 200),
    (1, 1, 2000),
    (1, 17, 200),
    (1, 32, 200),
    (8, 1, 200),
    (8, 8, 200),
    (32, 1, 200),
)
"""Sequences, rows of each, and tokens each has cached."""

PROFILED = ((1, 1, 200), (1, 32, 200), (32, 1, 200))
NUM_KERNELS = 12
NUM_CALLS = 20
READ_BYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-2-7b")
    args = parser.parse_args()
    with torch.inference_mode():
        measure(args.shape)


def measure(shape: str) -> None:
    read_bytes_per_s = reading()
    config = ModelConfig(
        name=shape,
        model="hdserve-tiny",
        engine=EngineConfig(dtype="bfloat16", device="cuda", compile=True),
        drafting=DraftingConfig(max_draft_tokens=MAX_DRAFT_TOKENS),
    )
    host = random_host(config, shape)
    num_bytes = bytes_read(host.model)
    bound_ms = 1e3 * num_bytes / read_bytes_per_s
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {shape}")
    print(f"{num_bytes / 1e9:.2f} GB at {read_bytes_per_s / 1e12:.2f} TB/s: {bound_ms:.2f} ms")
    runner = make_runner(host.model)
    print("\n| sequences | rows | cached | forward, ms | graph alone | forward to bound |")
    print("|--:|--:|--:|--:|--:|--:|")
    for point in POINTS:
        with chunks_of(runner, *point) as chunks:
            whole_ms = timed_ms(lambda: runner.forward(chunks))
            alone_ms = timed_ms(graph_of(runner, chunks).replay)
        ratio = whole_ms / bound_ms
        print(f"| {' | '.join(map(str, point))} | {whole_ms:.3f} | {alone_ms:.3f} | {ratio:.2f} |")
    for point in PROFILED:
        print_kernels(runner, point)


def reading() -> float:
    """Return the bytes a second that are read, in the faster of two ways."""
    numbers = torch.randint(0, 1 << 30, (READ_BYTES // 4,), dtype=torch.int32, device="cuda")
    matrix = torch.randn((1 << 15, 1 << 15), dtype=torch.bfloat16, device="cuda")
    seconds = timed_ms(numbers.max) / 1e3, timed_ms(lambda: torch.mv(matrix, matrix[0])) / 1e3
    return max(READ_BYTES / seconds[0], matrix.nbytes / seconds[1])


def bytes_read(model: LoadedModel) -> int:
    """Return the bytes that a forward reads: all weights but those of the embedding, of which it
    reads single rows, unless they are those of the head, too."""
    module: Any = model.module
    embedded = module.get_input_embeddings().weight
    is_head = embedded is module.get_output_embeddings().weight
    num_all = sum(int(weights.nbytes) for weights in module.parameters())
    return num_all if is_head else num_all - int(embedded.nbytes)


def make_runner(model: LoadedModel) -> ModelRunner:
    cache = KVCache(model.kv_shape, CACHE_TOKENS, model.dtype, model.device)
    runner = ModelRunner(model, cache, max_draft_tokens=MAX_DRAFT_TOKENS)
    runner.compile_with(compile_model(model))
    runner.warm_up(256)
    assert runner.attends_in_one_call, "the log says why"
    return runner


@contextmanager
def chunks_of(
    runner: ModelRunner, num_sequences: int, num_rows: int, num_columns: int
) -> Iterator[list[Chunk]]:
    """Return a binary tree of drafts for each sequence."""
    tree = binary_tree(num_rows)
    allocated = [runner.cache.rows.allocate(num_columns + num_rows) for _ in range(num_sequences)]
    segments = [segment for segment in allocated if segment is not None]
    assert len(segments) == num_sequences, "the cache is too small"
    yield [Chunk(segment, num_columns, [0], tree) for segment in segments]
    for segment in segments:
        runner.cache.rows.free(segment)


def graph_of(runner: ModelRunner, chunks: list[Chunk]) -> torch.cuda.CUDAGraph:
    """Return the graph that runs forwards of these chunks, which has run one."""
    assert runner._graphs is not None
    kind = runner._batch(chunks).kind
    assert kind is not None
    return runner._graphs._graphs[kind]


def timed_ms(call: Callable[[], object]) -> float:
    """Return the time of a call: each of a row of calls is waited for at the end only, and it is
    the median of five rows."""
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        torch.cuda.synchronize()
        rounds.append(1e3 * (time.perf_counter() - started) / NUM_CALLS)
    return statistics.median(rounds[1:])


def print_kernels(runner: ModelRunner, point: tuple[int, int, int]) -> None:
    """Print the kernels of the graph that take longest."""
    with chunks_of(runner, *point) as chunks:
        runner.forward(chunks)
        graph = graph_of(runner, chunks)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(NUM_CALLS):
                graph.replay()
            torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            found[event.name].append(event.device_time)
    times = {name: sum(each) / NUM_CALLS for name, each in found.items()}
    number = sum(map(len, found.values())) / NUM_CALLS
    print(f"\n{point}: {sum(times.values()):.0f} us of {number:.0f} kernels")
    print("\n| us | calls | kernel |\n|--:|--:|---|")
    for name in sorted(times, key=times.__getitem__, reverse=True)[:NUM_KERNELS]:
        print(f"| {times[name]:.0f} | {len(found[name]) / NUM_CALLS:.0f} | `{name[:90]}` |")


if __name__ == "__main__":
    main()
