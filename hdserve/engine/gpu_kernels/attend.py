"""Attention of draft trees over the KV cache, in one kernel.

The work of each step is listed as items (:mod:`hdserve.engine.kernels.splits`): splits of the
bodies of tiles, and the tails of rows.  The programs of a head share these items.  A row with only
one split is one item; for other tiles the last program to finish adds up all results, tails first,
then splits in order::

    items      split 0 | split 1 | ... | tails of rows 0 to 3 | tails of rows 4 to 7 | ...
    programs      0   |    1   | ... |          n           |        n + 1         | ...

So a row's result depends only on what it sees, bit for bit, as long as there is room for the
results of all splits: not on other rows, nor on where in the cache its ancestors are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import triton
import triton.language as tl

from hdserve.engine.kernels import splits

_PROGRAMS_PER_PROCESSOR: Final = 4
"""How many programs there are for each processor, in addition to one for each row."""

_LOG2_E: Final = 1.4426950408889634

_MAX_REGISTERS: Final = 168
"""The most registers of a thread for which a processor has room for three programs."""

_MAX_SIZE: Final = 128
"""The largest keys and values for which that many registers suffice, and for which three blocks of
them are loaded at the same time."""

_POWER = tl.constexpr(_LOG2_E)
_QUERIES = tl.constexpr(splits.QUERIES)
_KEYS = tl.constexpr(splits.TAIL)
_ROW_FIELDS = tl.constexpr(splits.ROW_FIELDS)
_TAIL_SIZE = tl.constexpr(splits.TAIL_SIZE)
_BODY_SIZE = tl.constexpr(splits.BODY_SIZE)
_ROW_POSITION = tl.constexpr(splits.ROW_POSITION)
_TAIL_ROWS = tl.constexpr(splits.TAIL_ROWS)
_NUM_REAL_ROWS = tl.constexpr(splits.NUM_REAL_ROWS)
_ITEM_FIELDS = tl.constexpr(splits.ITEM_FIELDS)
_TILE = tl.constexpr(splits.TILE)
_TILE_ROW = tl.constexpr(splits.TILE_ROW)
_TILE_ROWS = tl.constexpr(splits.TILE_ROWS)
_TILE_START = tl.constexpr(splits.TILE_START)
_TILE_SLOT = tl.constexpr(splits.TILE_SLOT)
_TILE_SPLITS = tl.constexpr(splits.TILE_SPLITS)
_TILE_ITEMS = tl.constexpr(splits.TILE_ITEMS)
_SPLIT_NUMBER = tl.constexpr(splits.SPLIT_NUMBER)
_SPLIT_FIRST = tl.constexpr(splits.SPLIT_FIRST)
_SPLIT_STOP = tl.constexpr(splits.SPLIT_STOP)
_FIRST_TAIL = tl.constexpr(splits.FIRST_TAIL)
_NUM_TAILS = tl.constexpr(splits.NUM_TAILS)
_SINGLE_STOP = tl.constexpr(splits.SINGLE_STOP)


class GpuTreeAttention:
    """Attends for forwards of few rows, all of them nodes of trees.

    Must not be used from two streams of a device at a time.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_programs = _PROGRAMS_PER_PROCESSOR * int(properties.multi_processor_count)
        self._found = torch.empty(0, dtype=torch.float32, device=device)
        """Results of the splits; grows to what the layer that needs most takes."""
        self._num_ended = torch.zeros(0, dtype=torch.int32, device=device)
        """How many items of each tile have ended, by heads; zero between two calls."""

    @staticmethod
    def can_attend(dtype: torch.dtype, sizes: Iterable[int]) -> bool:
        """Whether the kernel supports the dtype and the sizes of keys and values."""
        return dtype in (torch.bfloat16, torch.float16) and all(size % 16 == 0 for size in sizes)

    def __call__(
        self,
        rows: torch.Tensor,
        items: torch.Tensor,
        rows_per_tile: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with ``query [1, num_heads, num_rows, key_size]`` to the whole cache of a layer,
        ``keys [1, num_kv_heads, num_keys, key_size]`` and ``values`` alike.

        Args:
            rows, items, rows_per_tile: what the rows see, see
                :class:`~hdserve.engine.attention.gpu_tree_metadata.TreeAttentionMetadata`.
            sinks: ``[num_heads]``, see :func:`~hdserve.engine.attention.packed.packed_attention`.

        Returns:
            ``[1, num_rows, num_heads, value_size]``; zeros in rows of padding.
        """
        _, num_heads, num_rows, key_size = query.shape
        num_kv_heads, value_size = values.shape[1], values.shape[3]
        if query.stride(3) != 1:
            query = query.contiguous()
        num_groups = num_heads // num_kv_heads
        groups_at_once = min(splits.MAX_GROUPS, triton.next_power_of_2(num_groups))
        assert rows_per_tile * groups_at_once <= splits.QUERIES, "tiles are for fewer heads"
        num_blocks = num_kv_heads * triton.cdiv(num_groups, groups_at_once)
        width = triton.next_power_of_2(value_size)
        is_small = max(width, key_size) <= _MAX_SIZE
        sums, extremes = self._room(num_blocks, width)
        attended = query.new_empty((1, num_rows, num_heads, value_size))
        num_programs = num_rows + triton.cdiv(self._num_programs, num_blocks)
        _attend[(num_programs, num_blocks)](
            *(query, query.stride(1), query.stride(2)),
            *(keys, keys.stride(1), values, values.stride(1), attended),
            *(rows, items, num_rows, sums, extremes, self._num_ended),
            query if sinks is None else sinks,
            scale * _LOG2_E if softcap is None else 2.0 * scale * _LOG2_E / softcap,
            0.0 if softcap is None else softcap * _LOG2_E,
            0 if window is None else window,
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_SINKS=sinks is not None,
            GROUPS=num_groups,
            GROUPS_AT_ONCE=groups_at_once,
            KEY_SIZE=key_size,
            KEY_WIDTH=triton.next_power_of_2(key_size),
            VALUE_SIZE=value_size,
            VALUE_WIDTH=width,
            SINGLE_STAGES=3 if is_small else 2,
            num_warps=4,
            num_stages=2,
            maxnreg=_MAX_REGISTERS if is_small else None,
        )
        return attended

    def _room(self, num_blocks: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for sums of values, and after them sums of weights and highest scores."""
        num_queries = splits.MAX_SPLITS * num_blocks * splits.QUERIES
        num_sums, num_numbers = num_queries * width, num_queries * (width + 2)
        if self._found.numel() < num_numbers:
            self._found = self._found.new_empty(num_numbers)
        if self._num_ended.numel() < splits.MAX_ROWS * num_blocks:
            self._num_ended = self._num_ended.new_zeros(splits.MAX_ROWS * num_blocks)
        return self._found, self._found[num_sums:]


@triton.jit
def _read_queries(query_at, is_query, KEY_SIZE: tl.constexpr, KEY_WIDTH: tl.constexpr):
    of_key = tl.arange(0, KEY_WIDTH)
    is_number = is_query[:, None] & (of_key[None, :] < KEY_SIZE)
    return tl.load(query_at[:, None] + of_key[None, :], mask=is_number, other=0.0)


@triton.jit
def _read_keys(keys, key_row, is_key, KEY_SIZE: tl.constexpr, KEY_WIDTH: tl.constexpr):
    of_key = tl.arange(0, KEY_WIDTH)
    is_number = is_key[None, :] & (of_key[:, None] < KEY_SIZE)
    return tl.load(keys + key_row[None, :] * KEY_SIZE + of_key[:, None], mask=is_number, other=0.0)


@triton.jit
def _read_values(values, key_row, is_key, VALUE_SIZE: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    of_value = tl.arange(0, VALUE_WIDTH)
    is_number = is_key[:, None] & (of_value[None, :] < VALUE_SIZE)
    return tl.load(
        values + key_row[:, None] * VALUE_SIZE + of_value[None, :], mask=is_number, other=0.0
    )


@triton.jit
def _scores(numbers, key_numbers, is_seen, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The scores of queries and keys, as base-2 logarithms of the weights."""
    scores = tl.dot(numbers, key_numbers) * scale
    if HAS_SOFTCAP:
        scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * softcap  # a hyperbolic tangent
    return tl.where(is_seen, scores, -float("inf"))


@triton.jit
def _above(most):
    """The reference that weights are relative to; 0 if nothing is seen."""
    return tl.where(most == -float("inf"), 0.0, most)


@triton.jit
def _place_of(slot):
    """Where a program stores a slot's results for its heads."""
    return slot.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def _nothing(VALUE_WIDTH: tl.constexpr):
    """Highest scores, sums of weights and sums of values of a row that sees nothing."""
    most = tl.full([_QUERIES], -float("inf"), tl.float32)
    return most, tl.zeros([_QUERIES], tl.float32), tl.zeros([_QUERIES, VALUE_WIDTH], tl.float32)


@triton.jit
def _added(most, total, sums, other_most, other_total, other_sums):
    """The results of two splits, combined."""
    higher = tl.maximum(most, other_most)
    base = _above(higher)
    shrunk, other_shrunk = tl.exp2(most - base), tl.exp2(other_most - base)
    total = total * shrunk + other_total * other_shrunk
    return higher, total, sums * shrunk[:, None] + other_sums * other_shrunk[:, None]


@triton.jit
def _attend_tail(
    query_at,
    is_query,
    keys,
    values,
    row,
    scale,
    softcap,
    window,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """The result for the tail of a row."""
    one_key, size = tl.arange(0, _KEYS), tl.load(row + _TAIL_SIZE)
    is_key = one_key < size
    key_row = tl.load(row + _TAIL_ROWS + one_key, mask=is_key, other=0).to(tl.int64)
    numbers = _read_queries(query_at, is_query, KEY_SIZE, KEY_WIDTH)
    key_numbers = _read_keys(keys, key_row, is_key, KEY_SIZE, KEY_WIDTH)
    value_numbers = _read_values(values, key_row, is_key, VALUE_SIZE, VALUE_WIDTH)
    is_seen = is_key
    if HAS_WINDOW:
        is_seen = is_seen & (size - 1 - one_key < window)
    scores = _scores(numbers, key_numbers, is_seen[None, :], scale, softcap, HAS_SOFTCAP)
    most = tl.max(scores, axis=1)
    weights = tl.exp2(scores - _above(most)[:, None])
    total = tl.sum(weights, axis=1)
    return most, total, tl.dot(weights.to(value_numbers.dtype), value_numbers)


@triton.jit
def _attend_split(
    query_at,
    is_query,
    keys,
    values,
    row,
    start,
    first,
    stop,
    scale,
    softcap,
    window,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """The result for the positions from one to another in the bodies of several rows."""
    one_key = tl.arange(0, _KEYS)
    most, total, sums = _nothing(VALUE_WIDTH)
    if first < stop:
        size = tl.load(row + _BODY_SIZE, mask=is_query, other=0)
        position, begin = size, first
        if HAS_WINDOW:
            position = tl.load(row + _ROW_POSITION, mask=is_query, other=1 << 30)
            num_hidden = tl.min(position, axis=0) - window + 1 - first
            begin += tl.maximum(num_hidden, 0) // _KEYS * _KEYS
        numbers = _read_queries(query_at, is_query, KEY_SIZE, KEY_WIDTH)
        for key in range(begin, stop, _KEYS):
            key_position = key + one_key
            is_key = key_position < stop
            key_row = (start + key_position).to(tl.int64)
            key_numbers = _read_keys(keys, key_row, is_key, KEY_SIZE, KEY_WIDTH)
            is_seen = key_position[None, :] < size[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (position[:, None] - key_position[None, :] < window)
            scores = _scores(numbers, key_numbers, is_seen, scale, softcap, HAS_SOFTCAP)
            higher = tl.maximum(most, tl.max(scores, axis=1))
            weights = tl.exp2(scores - _above(higher)[:, None])
            shrunk = tl.exp2(most - _above(higher))
            total = total * shrunk + tl.sum(weights, axis=1)
            value_numbers = _read_values(values, key_row, is_key, VALUE_SIZE, VALUE_WIDTH)
            sums = tl.dot(weights.to(value_numbers.dtype), value_numbers, sums * shrunk[:, None])
            most = higher
    return most, total, sums


@triton.jit
def _keep(sums_at, extremes_at, most, total, sums, is_kept, VALUE_WIDTH: tl.constexpr):
    of_value = tl.arange(0, VALUE_WIDTH)
    tl.store(sums_at[:, None] + of_value[None, :], sums, mask=is_kept[:, None])
    tl.store(extremes_at, most, mask=is_kept)
    tl.store(extremes_at + _QUERIES, total, mask=is_kept)


@triton.jit
def _read_kept(sums_at, extremes_at, is_query, VALUE_WIDTH: tl.constexpr):
    """Read a stored result, of this or another program."""
    of_value = tl.arange(0, VALUE_WIDTH)
    most = tl.load(extremes_at, mask=is_query, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(extremes_at + _QUERIES, mask=is_query, other=0.0, cache_modifier=".cg")
    sums = tl.load(
        sums_at[:, None] + of_value[None, :],
        mask=is_query[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return most, total, sums


@triton.jit
def _add_up(sums_at, extremes_at, first_slot, num_splits, is_query, VALUE_WIDTH: tl.constexpr):
    """The combined results of a tile's tails and splits."""
    slot = _place_of(first_slot + num_splits)
    most, total, sums = _read_kept(
        sums_at + slot * _QUERIES * VALUE_WIDTH,
        extremes_at + slot * 2 * _QUERIES,
        *(is_query, VALUE_WIDTH),
    )
    for split in tl.range(0, num_splits, loop_unroll_factor=4):
        slot = _place_of(first_slot + split)
        split_most, split_total, split_sums = _read_kept(
            sums_at + slot * _QUERIES * VALUE_WIDTH,
            extremes_at + slot * 2 * _QUERIES,
            *(is_query, VALUE_WIDTH),
        )
        most, total, sums = _added(most, total, sums, split_most, split_total, split_sums)
    return most, total, sums


@triton.jit
def _finish(
    attended_at,
    sinks_at,
    most,
    total,
    sums,
    is_query,
    HAS_SINKS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Store the attention output of the queries."""
    if HAS_SINKS:
        sink = tl.load(sinks_at, mask=is_query, other=0.0).to(tl.float32)
        total += tl.exp2(sink * _POWER - most)
    of_value = tl.arange(0, VALUE_WIDTH)
    tl.store(
        attended_at[:, None] + of_value[None, :],
        (sums / total[:, None]).to(attended_at.dtype.element_ty),
        mask=is_query[:, None] & (of_value[None, :] < VALUE_SIZE),
    )


@triton.jit
def _clear_padding(
    attended_at,
    row_size,
    items,
    num_rows,
    is_own,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Store zeros in a row of padding, for which there is a program of its own."""
    row, of_value = tl.program_id(0), tl.arange(0, VALUE_WIDTH)
    if (row >= tl.load(items + _NUM_REAL_ROWS)) & (row < num_rows):
        tl.store(
            attended_at[:, None] + row * row_size + of_value[None, :],
            tl.zeros([_QUERIES, VALUE_WIDTH], attended_at.dtype.element_ty),
            mask=is_own[:, None] & (of_value[None, :] < VALUE_SIZE),
        )


@triton.jit
def _attend_single(
    query_at,
    is_query,
    keys,
    values,
    start,
    body,
    stop,
    scale,
    softcap,
    window,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The result for a row that ends at ``stop`` and whose body is one split: what
    ``_attend_tail`` and ``_attend_split`` find, in one loop, so that no load waits for a list."""
    one_key = tl.arange(0, _KEYS)
    numbers = _read_queries(query_at, is_query, KEY_SIZE, KEY_WIDTH)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(stop - window, 0) // _KEYS * _KEYS
    num_blocks = 1 + tl.cdiv(tl.maximum(body - begin, 0), _KEYS)
    most, total, sums = _nothing(VALUE_WIDTH)
    tail_most, tail_total, tail_sums = _nothing(VALUE_WIDTH)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        is_tail = block == 0
        key_position = tl.where(is_tail, body, begin + (block - 1) * _KEYS) + one_key
        is_key = key_position < tl.where(is_tail, stop, body)
        key_row = (start + key_position).to(tl.int64)
        key_numbers = _read_keys(keys, key_row, is_key, KEY_SIZE, KEY_WIDTH)
        is_seen = is_key
        if HAS_WINDOW:
            is_seen = is_seen & (stop - 1 - key_position < window)
        scores = _scores(numbers, key_numbers, is_seen[None, :], scale, softcap, HAS_SOFTCAP)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp2(scores - _above(higher)[:, None])
        shrunk = tl.exp2(most - _above(higher))
        total = total * shrunk + tl.sum(weights, axis=1)
        value_numbers = _read_values(values, key_row, is_key, VALUE_SIZE, VALUE_WIDTH)
        sums = tl.dot(weights.to(value_numbers.dtype), value_numbers, sums * shrunk[:, None])
        tail_most = tl.where(is_tail, higher, tail_most)
        tail_total = tl.where(is_tail, total, tail_total)
        tail_sums = tl.where(is_tail, sums, tail_sums)
        most = tl.where(is_tail, -float("inf"), higher)
        total = tl.where(is_tail, 0.0, total)
        sums = tl.where(is_tail, 0.0, sums)
    return _added(tail_most, tail_total, tail_sums, most, total, sums)


@triton.jit
def _item(items, number):
    """The fields of an item; the entry after the last one may be read, too."""
    item = items + (number + 1) * _ITEM_FIELDS
    return (
        tl.load(item + _TILE),
        tl.load(item + _TILE_ROW),
        tl.load(item + _TILE_ROWS),
        tl.load(item + _TILE_START),
        tl.load(item + _TILE_SLOT),
        tl.load(item + _TILE_SPLITS),
        tl.load(item + _TILE_ITEMS),
        tl.load(item + _SPLIT_NUMBER),
        tl.load(item + _SPLIT_FIRST),
        tl.load(item + _SPLIT_STOP),
        tl.load(item + _FIRST_TAIL),
        tl.load(item + _NUM_TAILS),
        tl.load(item + _SINGLE_STOP),
    )


@triton.jit
def _attend(
    query,
    query_head,
    query_row,
    keys,
    keys_head,
    values,
    values_head,
    attended,
    rows,
    items,
    num_all_rows,
    kept_sums,
    kept_extremes,
    num_ended,
    sinks,
    scale,
    softcap,
    window,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_AT_ONCE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SINGLE_STAGES: tl.constexpr,
):
    BLOCKS_OF_HEAD: tl.constexpr = (GROUPS + GROUPS_AT_ONCE - 1) // GROUPS_AT_ONCE
    block, num_blocks = tl.program_id(1), tl.num_programs(1)
    head, num_heads = (block // BLOCKS_OF_HEAD).to(tl.int64), num_blocks // BLOCKS_OF_HEAD * GROUPS
    index = tl.arange(0, _QUERIES)
    own_row = index // GROUPS_AT_ONCE
    group = block % BLOCKS_OF_HEAD * GROUPS_AT_ONCE + index % GROUPS_AT_ONCE
    own_head = head * GROUPS + group
    query += own_head * query_head
    keys, values = keys + head * keys_head, values + head * values_head
    number, num_all = tl.program_id(0), tl.load(items)
    item = _item(items, number)  # together with their number, so that neither waits for the other
    while number < num_all:
        tile, first_row, num_rows, start, first_slot, num_splits, num_items = item[:7]
        split, first, stop, first_tail, num_tails, single_stop = item[7:]
        is_query = (own_row < num_rows) & (group < GROUPS)
        is_of_tail = (own_row == 0) & (group < GROUPS)
        attended_at = attended + ((first_row + own_row) * num_heads + own_head) * VALUE_SIZE
        if single_stop > 0:
            most, total, sums = _attend_single(
                *(query + first_row * query_row, is_of_tail, keys, values),
                *(start, stop, single_stop, scale, softcap, window),
                *(HAS_SOFTCAP, HAS_WINDOW, KEY_SIZE, KEY_WIDTH, VALUE_SIZE, VALUE_WIDTH),
                SINGLE_STAGES,
            )
            _finish(
                *(attended_at, sinks + own_head, most, total, sums, is_of_tail),
                *(HAS_SINKS, VALUE_SIZE, VALUE_WIDTH),
            )
        else:
            slot = _place_of(first_slot + num_splits)
            for place in range(first_tail, first_tail + num_tails):
                most, total, sums = _attend_tail(
                    *(query + (first_row + place) * query_row, is_of_tail, keys, values),
                    *(rows + (first_row + place) * _ROW_FIELDS, scale, softcap, window),
                    *(HAS_SOFTCAP, HAS_WINDOW, KEY_SIZE, KEY_WIDTH, VALUE_SIZE, VALUE_WIDTH),
                )
                at = place * GROUPS_AT_ONCE + index
                _keep(
                    kept_sums + (slot * _QUERIES + at) * VALUE_WIDTH,
                    kept_extremes + slot * 2 * _QUERIES + at,
                    *(most, total, sums, is_of_tail, VALUE_WIDTH),
                )
            most, total, sums = _attend_split(
                *(query + (first_row + own_row) * query_row, is_query, keys, values),
                rows + (first_row + own_row) * _ROW_FIELDS,
                *(start, first, stop, scale, softcap, window),
                *(HAS_SOFTCAP, HAS_WINDOW, KEY_SIZE, KEY_WIDTH, VALUE_SIZE, VALUE_WIDTH),
            )
            sums_at = kept_sums + index * VALUE_WIDTH
            split_slot = _place_of(first_slot + split)
            _keep(
                sums_at + split_slot * _QUERIES * VALUE_WIDTH,
                kept_extremes + split_slot * 2 * _QUERIES + index,
                *(most, total, sums, is_query & (first < stop), VALUE_WIDTH),
            )
            tl.debug_barrier()  # all results are stored before this item is counted
            ended_at = num_ended + tile * num_blocks + block
            if tl.atomic_add(ended_at, 1, sem="acq_rel") == num_items - 1:
                most, total, sums = _add_up(
                    *(sums_at, kept_extremes + index, first_slot, num_splits, is_query),
                    VALUE_WIDTH,
                )
                _finish(
                    *(attended_at, sinks + own_head, most, total, sums, is_query),
                    *(HAS_SINKS, VALUE_SIZE, VALUE_WIDTH),
                )
                tl.store(ended_at, 0)
        number = min(number + tl.num_programs(0), num_all)
        item = _item(items, number)
    _clear_padding(
        *(attended + own_head * VALUE_SIZE, num_heads * VALUE_SIZE, items, num_all_rows),
        *((own_row == 0) & (group < GROUPS), VALUE_SIZE, VALUE_WIDTH),
    )
