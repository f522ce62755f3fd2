"""Storing the keys and values of a forward's rows in the KV cache, in one kernel.

By PyTorch's operators it takes 13 kernels a layer, as non-finite values have to be found
(:meth:`~hdserve.engine.kv_cache.cache.KVCache.write`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def store_rows(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
) -> None:
    """Like :meth:`~hdserve.engine.kv_cache.cache.KVCache.write` for a cache that is read whole.

    Args:
        rows: ``[n]`` int64.
        keys, values: ``[1, heads, n, size]``, contiguous in the last dimension.
        own_keys, own_values: the cache's, ``[1, heads, all rows, size]``, the last two contiguous.
    """
    _, num_heads, num_rows, key_size = keys.shape
    value_size = values.shape[3]
    if keys.stride(3) != 1 or values.stride(3) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    _store[(num_rows, num_heads)](
        rows,
        *(keys, keys.stride(1), keys.stride(2)),
        *(values, values.stride(1), values.stride(2)),
        *(own_keys, own_keys.stride(1)),
        *(own_values, own_values.stride(1)),
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        WIDTH=triton.next_power_of_2(max(key_size, value_size)),
        MAY_OVERFLOW=keys.dtype == torch.float16,
        num_warps=1,
    )


@triton.jit
def _store(
    rows,
    keys,
    keys_head,
    keys_row,
    values,
    values_head,
    values_row,
    own_keys,
    own_keys_head,
    own_values,
    own_values_head,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MAY_OVERFLOW: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    target = tl.load(rows + row)
    at = tl.arange(0, WIDTH)
    of_key, of_value = at < KEY_SIZE, at < VALUE_SIZE
    key = tl.load(keys + head * keys_head + row * keys_row + at, mask=of_key, other=0.0)
    value = tl.load(values + head * values_head + row * values_row + at, mask=of_value, other=0.0)
    is_number = tl.abs(value) < float("inf")
    value = tl.where(is_number, value, 0.0)
    if MAY_OVERFLOW:
        key = tl.where(tl.abs(key) < float("inf"), key, 0.0)
    else:
        is_broken = tl.max(tl.where(is_number, 0, 1), axis=0) > 0
        key = tl.where(is_broken, float("nan"), key)
    tl.store(own_keys + head * own_keys_head + target * KEY_SIZE + at, key, mask=of_key)
    tl.store(own_values + head * own_values_head + target * VALUE_SIZE + at, value, mask=of_value)
