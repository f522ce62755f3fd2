"""What attention and products of few rows take on a GPU, products with other settings, too.

    python -m benchmarks.gpu_kernels

Microseconds of a kernel in a CUDA graph that calls it for one layer after the other, so that
neither weights nor keys are in the caches; bfloat16, layers of llama-2-7b's shape.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton

from hdserve.engine.attention.gpu_tree_metadata import TreeAttentionMetadata
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.packed_rows import pack_rows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.gpu_kernels.attend import GpuTreeAttention
from hdserve.engine.gpu_kernels.multiply import (
    _INPUTS,
    _MIN_ROWS,
    _OUTPUTS,
    RowProducts,
    _multiply,
)
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.shape import KVShape, LayerShape
from hdserve.engine.loading.forward_cost import binary_tree

NUM_LAYERS = 24
NUM_ROUNDS = 9
NUM_FASTEST = 8
HEAD_SIZE = 128
CACHE_TOKENS = 16_384
WEIGHT_BYTES = 2 << 30
PRODUCTS = {
    "queries, keys and values": (12_288, 4096),
    "output of attention": (4096, 4096),
    "gate and up": (22_016, 4096),
    "down": (4096, 11_008),
    "head": (32_000, 4096),
}
"""Outputs and inputs."""

ATTENTION = (
    *((32, 32, 1, 1, 100), (32, 32, 1, 1, 200), (32, 32, 1, 1, 600), (32, 32, 1, 1, 2000)),
    *((32, 32, 1, 32, 200), (32, 32, 8, 1, 200), (32, 32, 32, 1, 200)),
    *((32, 8, 1, 1, 200), (32, 8, 32, 1, 200)),
)
"""Heads, heads of keys, sequences, rows of each, and tokens each has cached."""


class Setting(NamedTuple):
    """How products are divided: outputs of a program, inputs of a block, programs that share the
    inputs, blocks that are loaded at the same time, warps."""

    num_outputs: int
    num_inputs: int
    num_parts: int
    num_stages: int
    num_warps: int


BLOCKS = ((32, 128), (32, 256), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
"""Outputs of a program and inputs of a block."""

SETTINGS = [
    Setting(*block, num_parts, num_stages, 8 if block[0] == 128 else 4)
    for block, num_parts, num_stages in product(BLOCKS, (1, 2, 3), (2, 3, 4, 5, 6))
    if 49_152 <= 2 * block[0] * block[1] * num_stages <= 98_304
]
"""Those with enough bytes on their way, and of which a processor has room for two programs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1, help="of products")
    args = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Triton {triton.__version__}"
    )
    with torch.inference_mode():
        print_attention()
        print_products(args.rows)


def timed_us(call: Callable[[int], object]) -> float:
    """Return the time of ``call(layer)`` in a graph of all layers, the median of all rounds."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS):
            call(layer)
    rounds = []
    for _ in range(NUM_ROUNDS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        rounds.append(1e3 * begun.elapsed_time(ended) / NUM_LAYERS)
    return statistics.median(rounds)


def print_attention() -> None:
    print("\n| heads | of keys | sequences | rows | cached | us |\n|--:|--:|--:|--:|--:|--:|")
    attend = GpuTreeAttention(torch.device("cuda"))
    for point in ATTENTION:
        print(f"| {' | '.join(map(str, point))} | {attention_us(attend, *point):.1f} |", flush=True)


def attention_us(
    attend: GpuTreeAttention,
    num_heads: int,
    num_kv_heads: int,
    num_sequences: int,
    num_rows: int,
    num_cached: int,
) -> float:
    device, layer = torch.device("cuda"), LayerShape(num_kv_heads, HEAD_SIZE, HEAD_SIZE)
    cache = KVCache(KVShape((layer,) * NUM_LAYERS), CACHE_TOKENS, torch.bfloat16, device)
    for number in range(NUM_LAYERS):
        for tensor in cache.read_all(number):
            tensor.normal_()
    allocated = [cache.rows.allocate(num_cached + num_rows) for _ in range(num_sequences)]
    segments = [segment for segment in allocated if segment is not None]
    assert len(segments) == num_sequences, "the cache is too small"
    chunks = [Chunk(each, num_cached, [0], binary_tree(num_rows)) for each in segments]
    shapes = Shapes(tuple(1 << power for power in range(9)))
    packed = pack_rows(chunks, shapes, cache.scratch_row)
    seen = TreeAttentionMetadata(packed.num_rows, num_heads // num_kv_heads, device)
    seen.fill(packed)
    seen.send()
    size = (1, num_heads, packed.num_rows, HEAD_SIZE)
    query = torch.randn(size, device=device, dtype=torch.bfloat16)
    what = seen.rows, seen.items, seen.rows_per_tile, query
    terms = HEAD_SIZE**-0.5, None, None, None
    return timed_us(lambda number: attend(*what, *cache.read_all(number), *terms))


def print_products(num_rows: int) -> None:
    weights = torch.randn(WEIGHT_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    multiply = RowProducts(weights.device)
    for name, (num_outputs, num_inputs) in PRODUCTS.items():
        print(f"\n{name}, {num_outputs} x {num_inputs}, {num_rows} rows")
        print("\n| outputs | inputs | parts | stages | warps | us |\n|--:|--:|--:|--:|--:|--:|")
        time_us = partial(product_us, weights, num_rows, num_outputs, num_inputs)
        fits = [
            each
            for each in SETTINGS
            if num_outputs % each.num_outputs == num_inputs % each.num_inputs == 0
            and (each.num_parts == 1 or num_outputs <= PRODUCTS["output of attention"][0])
        ]
        found = sorted((time_us(setting), setting) for setting in fits)
        own = own_setting(multiply, num_rows, num_outputs, num_inputs)
        for us, setting in [*found[:NUM_FASTEST], (time_us(own), own)]:
            print(f"| {' | '.join(map(str, setting))} | {us:.2f} |", flush=True)


def own_setting(multiply: RowProducts, num_rows: int, num_outputs: int, num_inputs: int) -> Setting:
    """Return what the engine chooses, which is printed last."""
    num_blocks = num_outputs // _OUTPUTS
    num_parts = multiply._num_parts(num_blocks, num_inputs)
    num_stages = multiply._num_stages(padded(num_rows), num_blocks * num_parts)
    return Setting(_OUTPUTS, _INPUTS, num_parts, num_stages, 4)


def padded(num_rows: int) -> int:
    return max(_MIN_ROWS, triton.next_power_of_2(num_rows))


def product_us(
    weights: torch.Tensor, num_rows: int, num_outputs: int, num_inputs: int, setting: Setting
) -> float:
    """Return the time of a product, or infinity for a setting that the GPU has no room for."""
    num_blocks = num_outputs // setting.num_outputs
    rows = weights[: num_rows * num_inputs]
    products = weights.new_empty((num_rows, num_outputs))
    found = products.new_empty(
        (setting.num_parts, num_outputs, padded(num_rows)), dtype=torch.float32
    )
    num_ended = torch.zeros(num_blocks, dtype=torch.int32, device=weights.device)
    size = num_outputs * num_inputs
    num_layers = len(weights) // size

    def call(layer: int) -> None:
        weight = weights[layer % num_layers * size :][:size]
        three: Any = (weight,) * 3
        _multiply[(num_blocks, setting.num_parts)](
            *(rows, found, num_ended, num_rows, num_inputs),
            *(*three, *three, *(products,) * 3, *(num_outputs,) * 3),
            COUNT=1,
            HAS_BIAS=False,
            ARE_WHOLE=True,
            IS_WHOLE_ROW=True,
            ROWS=padded(num_rows),
            OUTPUTS=setting.num_outputs,
            INPUTS=setting.num_inputs,
            PARTS=setting.num_parts,
            num_warps=setting.num_warps,
            num_stages=setting.num_stages,
        )

    try:
        return timed_us(call)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


if __name__ == "__main__":
    main()
