"""Whether a GPU runs our kernels."""

from __future__ import annotations

import torch

from hdserve.core import Source
from hdserve.engine.attention.gpu_tree_metadata import TreeAttentionMetadata
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.batch.packed_rows import pack_rows
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.gpu_kernels.attend import GpuTreeAttention
from hdserve.engine.gpu_kernels.draw import draw_tokens
from hdserve.engine.gpu_kernels.move import RowMover
from hdserve.engine.gpu_kernels.multiply import RowProducts
from hdserve.engine.gpu_kernels.store import store_rows
from hdserve.engine.gpu_kernels.top import find_largest
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree

_SIZE = 256

_NUM_CACHED = 600
_NUM_KEYS = 640
_WINDOW = 400
_SCALE = 0.125
_TOLERANCE = 0.02


def do_all_run(device: torch.device) -> bool:
    """Whether each of them gives correct results in the smallest case.

    Raises:
        Exception: a kernel cannot be compiled or run.
    """
    dtypes = torch.float32, torch.float16, torch.bfloat16
    found = [_runs(device, dtype) for dtype in dtypes]
    found += [_attends(device, dtype) for dtype in dtypes[1:]]
    if RowProducts.are_fast_on(device):
        found += [_multiplies(device, num_inputs) for num_inputs in (_SIZE, _SIZE + 8)]
    return all(found)


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels that support any dtype give correct results."""
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]], device=device, dtype=dtype)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    column = find_largest(logits, 1)[1].view(torch.int32)
    token = draw_tokens(logits, zero, 1.0)
    own_keys, own_values = torch.zeros((2, 1, 1, 2, 16), device=device, dtype=dtype)
    row = torch.ones((1, 1, 1, 16), device=device, dtype=dtype)
    store_rows(zero, row, row, own_keys[None], own_values[None])
    RowMover(device)([own_keys], [(0, 1)])
    are_stored = bool((own_keys == 1.0).all()) and own_values.sum().item() == 16
    return are_stored and token.item() == column.item() == 1


def _attends(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tree nodes get the same results as by PyTorch's attention, with and without a
    window."""
    tree = DraftTree(0, 3)
    for parent, token_id in ((0, 1), (1, 2), (0, 3)):
        tree.add_node(parent, token_id, Source.OTHER)
    chunk = Chunk(Segment(0, _NUM_KEYS), _NUM_CACHED, [0], tree)
    seen = TreeAttentionMetadata(len(tree), 1, device)
    seen.fill(pack_rows([chunk], Shapes(), _NUM_KEYS - 1))
    seen.send()
    query, keys, values = torch.randn((3, 1, 1, _NUM_KEYS, 64), device=device, dtype=dtype)
    query = query[:, :, : len(tree)]
    attend = GpuTreeAttention(device)
    for window in (None, _WINDOW):
        found = attend(seen, query, keys, values, _SCALE, window, None, None)[0, :, 0]
        for node in range(len(tree)):
            path = [_NUM_CACHED + each for each in tree.path_to(node)]
            rows = [*range(_NUM_CACHED), *path][-(window or _NUM_KEYS) :]
            scores = keys[0, 0, rows].float() @ query[0, 0, node].float() * _SCALE
            wanted = scores.softmax(dim=0) @ values[0, 0, rows].float()
            if not (found[node] - wanted).norm() < _TOLERANCE * wanted.norm():
                return False
    return True


def _multiplies(device: torch.device, num_inputs: int) -> bool:
    ones = torch.ones((64, num_inputs), device=device, dtype=torch.bfloat16)
    (products,) = RowProducts(device)(ones[:1], [ones], [None])
    return bool((products == num_inputs).all())
