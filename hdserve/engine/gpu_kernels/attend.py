"""Attention of draft trees over the KV cache, in one kernel.

What there is to do is listed for each step (:mod:`hdserve.engine.kernels.parts`): parts of the
bodies of tiles, and the tails of rows.  The programs of a head share them; of a tile the last to
end adds up what all have found, tails first, then parts in order::

    items      part 0 | part 1 | ... | tail of row 0 | tail of row 1 | ...
    programs      0   |    1   | ... |       n       |      n + 1    | ...    and from 0 again

So what a row gets depends on nothing but what it sees, bit for bit: neither on other rows nor on
where in the cache its ancestors are.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from hdserve.engine.kernels import parts
from hdserve.engine.kv_cache import KVCache

_MAX_GROUPS: Final = 4
"""Query heads of a program, which share keys."""

_MIN_QUERIES: Final = 16
"""Fewer are not multiplied at a time."""

_PROGRAMS_PER_PROCESSOR: Final = 4
"""Beside those for the tails."""

_LOG2_E: Final = 1.4426950408889634


class TreeAttention:
    """Attends for forwards of few rows, all of them nodes of trees.

    Not for two streams of a device at a time.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._num_programs = _PROGRAMS_PER_PROCESSOR * int(properties.multi_processor_count)
        self._found = torch.empty(0, dtype=torch.float32, device=device)
        """By parts; as much as the layer with most needs, once each has attended."""
        self._num_ended = torch.zeros(0, dtype=torch.int32, device=device)
        """Items of a tile, by heads; zero between two calls."""

    @staticmethod
    def can_read(cache: KVCache) -> bool:
        """Whether the kernel knows its dtype and sizes."""
        return cache.dtype in (torch.bfloat16, torch.float16) and all(
            layer.key_size % 16 == layer.value_size % 16 == 0 for layer in cache.shape.layers
        )

    def __call__(
        self,
        fields: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with ``query [1, num_heads, num_rows, key_size]``, a power of two of rows, to the
        whole cache of a layer, ``keys [1, num_kv_heads, num_keys, key_size]`` and ``values`` alike.

        Args:
            fields: int32 ``[NUM_FIELDS, at least num_rows]``, see
                :func:`~hdserve.engine.kernels.parts.describe_parts`.
            sinks: ``[num_heads]``, see :func:`~hdserve.engine.attention.packed_attention`.

        Returns:
            ``[1, num_rows, num_heads, value_size]``; anything in rows of padding.
        """
        _, num_heads, num_rows, key_size = query.shape
        num_kv_heads, value_size = values.shape[1], values.shape[3]
        if query.stride(3) != 1:
            query = query.contiguous()
        num_groups = num_heads // num_kv_heads
        groups_at_once = min(_MAX_GROUPS, triton.next_power_of_2(num_groups))
        num_blocks = triton.cdiv(num_groups, groups_at_once)
        num_queries = max(_MIN_QUERIES, parts.ROWS_PER_TILE * groups_at_once)
        width = triton.next_power_of_2(value_size)
        sums, extremes = self._room(num_kv_heads * num_blocks, num_queries, width)
        attended = query.new_empty((1, num_rows, num_heads, value_size))
        num_programs = num_rows + triton.cdiv(self._num_programs, num_kv_heads * num_blocks)
        _attend[(num_programs, num_kv_heads * num_blocks)](
            *(query, query.stride(1), query.stride(2)),
            *(keys, keys.stride(1), values, values.stride(1), attended),
            *(fields, fields.stride(0)),
            *(sums, extremes, self._num_ended),
            query if sinks is None else sinks,
            scale * _LOG2_E if softcap is None else 2.0 * scale * _LOG2_E / softcap,
            0.0 if softcap is None else softcap * _LOG2_E,
            0 if window is None else window,
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            HAS_SINKS=sinks is not None,
            ROWS=num_rows,
            GROUPS=num_groups,
            GROUPS_AT_ONCE=groups_at_once,
            QUERIES=num_queries,
            KEY_SIZE=key_size,
            KEY_WIDTH=triton.next_power_of_2(key_size),
            VALUE_SIZE=value_size,
            VALUE_WIDTH=width,
            KEYS=parts.TAIL,
            PART=parts.PART,
            PARTS_OF_A_SIZE=parts.PARTS_OF_A_SIZE,
            TAIL_SIZE=parts.TAIL_SIZE,
            BODY_SIZE=parts.BODY_SIZE,
            ROW_POSITION=parts.ROW_POSITION,
            TILE=parts.TILE,
            PLACE=parts.PLACE,
            TILE_ROW=parts.TILE_ROW,
            TILE_ROWS=parts.TILE_ROWS,
            TILE_START=parts.TILE_START,
            TILE_SIZE=parts.TILE_SIZE,
            TILE_PARTS=parts.TILE_PARTS,
            FIRST_PART=parts.FIRST_PART,
            TOTALS=parts.TOTALS,
            TAIL_ROWS=parts.TAIL_ROWS,
            num_warps=8 if num_queries * width > 64 * 128 else 4,
            num_stages=2,
        )
        return attended

    def _room(
        self, num_heads: int, num_queries: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For sums of values, and beside them sums of weights and highest scores."""
        num_sums = parts.MAX_PARTS * num_heads * num_queries * width
        num_numbers = num_sums + parts.MAX_PARTS * num_heads * num_queries * 2
        if self._found.numel() < num_numbers:
            self._found = self._found.new_empty(num_numbers)
        if self._num_ended.numel() < parts.MAX_ROWS * num_heads:
            self._num_ended = self._num_ended.new_zeros(parts.MAX_ROWS * num_heads)
        return self._found, self._found[num_sums:]


@triton.jit
def _first_position(part, shift, PART: tl.constexpr, PARTS_OF_A_SIZE: tl.constexpr):
    """Of a part: there are so many of a size, then so many of twice that, and so on."""
    doubled = part // PARTS_OF_A_SIZE
    size = PART << shift
    before = PARTS_OF_A_SIZE * size * ((1 << doubled) - 1)
    return before + part % PARTS_OF_A_SIZE * (size << doubled)


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
    fields,
    stride,
    found,
    extremes,
    num_ended,
    sinks,
    scale,
    softcap,
    window,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_AT_ONCE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    PARTS_OF_A_SIZE: tl.constexpr,
    TAIL_SIZE: tl.constexpr,
    BODY_SIZE: tl.constexpr,
    ROW_POSITION: tl.constexpr,
    TILE: tl.constexpr,
    PLACE: tl.constexpr,
    TILE_ROW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_START: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    FIRST_PART: tl.constexpr,
    TOTALS: tl.constexpr,
    TAIL_ROWS: tl.constexpr,
):
    NUM_BLOCKS: tl.constexpr = (GROUPS + GROUPS_AT_ONCE - 1) // GROUPS_AT_ONCE
    block, num_blocks = tl.program_id(1), tl.num_programs(1)
    head = (block // NUM_BLOCKS).to(tl.int64)
    num_parts = tl.load(fields + TOTALS * stride)
    num_items = tl.load(fields + TOTALS * stride + 1)
    shift = tl.load(fields + TOTALS * stride + 2)
    first_parts = tl.load(fields + FIRST_PART * stride + tl.arange(0, ROWS))
    index = tl.arange(0, QUERIES)
    own_row = index // GROUPS_AT_ONCE
    group = block % NUM_BLOCKS * GROUPS_AT_ONCE + index % GROUPS_AT_ONCE
    own_head = head * GROUPS + group
    of_key, of_value = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    one_key = tl.arange(0, KEYS)
    keys += head * keys_head
    values += head * values_head
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        is_tail = item >= num_parts
        row = tl.maximum(item - num_parts, 0)
        tile = tl.sum((first_parts <= item).to(tl.int32), axis=0) - 1
        tile = tl.where(is_tail, tl.load(fields + TILE * stride + row), tile)
        tile_at = fields + tile
        first_row = tl.load(tile_at + TILE_ROW * stride)
        num_rows = tl.load(tile_at + TILE_ROWS * stride)
        start = tl.load(tile_at + TILE_START * stride)
        tile_parts = tl.load(tile_at + TILE_PARTS * stride)
        first_part = tl.load(tile_at + FIRST_PART * stride)
        part = tl.where(is_tail, tile_parts, item - first_part)
        place = tl.where(is_tail, tl.load(fields + PLACE * stride + row), 0)
        body = tl.load(fields + BODY_SIZE * stride + row)
        first = _first_position(part, shift, PART, PARTS_OF_A_SIZE)
        first = tl.where(is_tail, body, first)
        stop = _first_position(part + 1, shift, PART, PARTS_OF_A_SIZE)
        stop = tl.minimum(stop, tl.load(tile_at + TILE_SIZE * stride))
        tail_stop = body + tl.load(fields + TAIL_SIZE * stride + row)
        stop = tl.where(is_tail, tail_stop, stop)
        query_at = first_row + place + own_row
        is_query = (own_row < tl.where(is_tail, 1, num_rows)) & (group < GROUPS)
        sees = tl.load(fields + BODY_SIZE * stride + query_at, mask=is_query, other=0)
        sees = tl.where(is_tail, tail_stop, sees)
        numbers = tl.load(
            query + own_head[:, None] * query_head + query_at[:, None] * query_row + of_key,
            mask=is_query[:, None] & (of_key < KEY_SIZE),
            other=0.0,
        )
        begin = first
        position = query_at
        if HAS_WINDOW:
            at = fields + ROW_POSITION * stride + query_at
            position = tl.load(at, mask=is_query, other=1 << 30)
            hidden = tl.min(position, axis=0) - window + 1 - first
            begin += tl.maximum(hidden, 0) // KEYS * KEYS
        most = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
        for key in range(begin, stop, KEYS):
            key_position = key + one_key
            is_key = key_position < stop
            tail_at = fields + (TAIL_ROWS + key - first + one_key) * stride + row
            key_row = tl.load(tail_at, mask=is_key & is_tail, other=0)
            key_row = tl.where(is_tail, key_row, start + key_position).to(tl.int64)
            key_numbers = tl.load(
                keys + key_row[None, :] * KEY_SIZE + of_key[:, None],
                mask=is_key[None, :] & (of_key[:, None] < KEY_SIZE),
                other=0.0,
            )
            scores = tl.dot(numbers, key_numbers) * scale
            if HAS_SOFTCAP:
                scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * softcap  # a hyperbolic tangent
            is_seen = key_position[None, :] < sees[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (position[:, None] - key_position[None, :] < window)
            scores = tl.where(is_seen, scores, -float("inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            shrunk = tl.exp2(most - base)
            total = total * shrunk + tl.sum(weights, axis=1)
            value_numbers = tl.load(
                values + key_row[:, None] * VALUE_SIZE + of_value[None, :],
                mask=is_key[:, None] & (of_value[None, :] < VALUE_SIZE),
                other=0.0,
            )
            sums = tl.dot(weights.to(value_numbers.dtype), value_numbers, sums * shrunk[:, None])
            most = higher
        slot = (first_part + tile + part).to(tl.int64) * num_blocks + block
        kept = place * GROUPS_AT_ONCE + index
        is_kept = is_query | (is_tail == 0)
        sums_at = found + (slot * QUERIES + kept[:, None]) * VALUE_WIDTH + of_value[None, :]
        extremes_at = extremes + slot * 2 * QUERIES + kept
        tl.store(sums_at, sums, mask=is_kept[:, None])
        tl.store(extremes_at, most, mask=is_kept)
        tl.store(extremes_at + QUERIES, total, mask=is_kept)
        tl.debug_barrier()  # all of it is stored before it is counted
        ended_at = num_ended + tile * num_blocks + block
        before = tl.atomic_add(ended_at, 1, sem="acq_rel")
        if before == tile_parts + num_rows - 1:
            most = tl.full([QUERIES], -float("inf"), tl.float32)
            total = tl.zeros([QUERIES], tl.float32)
            sums = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
            is_own = (own_row < num_rows) & (group < GROUPS)
            for number in range(0, tile_parts + 1):
                each = first_part + tile + tl.where(number == 0, tile_parts, number - 1)
                slot = each.to(tl.int64) * num_blocks + block
                extremes_at = extremes + slot * 2 * QUERIES + index
                part_most = tl.load(
                    extremes_at, mask=is_own, other=-float("inf"), cache_modifier=".cg"
                )
                part_total = tl.load(
                    extremes_at + QUERIES, mask=is_own, other=0.0, cache_modifier=".cg"
                )
                sums_at = found + (slot * QUERIES + index[:, None]) * VALUE_WIDTH + of_value
                part_sums = tl.load(
                    sums_at, mask=(part_total != 0.0)[:, None], other=0.0, cache_modifier=".cg"
                )
                higher = tl.maximum(most, part_most)
                base = tl.where(higher == -float("inf"), 0.0, higher)
                shrunk, part_shrunk = tl.exp2(most - base), tl.exp2(part_most - base)
                total = total * shrunk + part_total * part_shrunk
                sums = sums * shrunk[:, None] + part_sums * part_shrunk[:, None]
                most = higher
            if HAS_SINKS:
                sink = tl.load(sinks + own_head, mask=is_own, other=0.0).to(tl.float32)
                total += tl.exp2(sink * 1.4426950408889634 - most)
            own = (first_row + own_row) * (num_blocks // NUM_BLOCKS * GROUPS) + own_head
            found_at = attended + own[:, None] * VALUE_SIZE
            tl.store(
                found_at + of_value[None, :],
                (sums / total[:, None]).to(attended.dtype.element_ty),
                mask=is_own[:, None] & (of_value[None, :] < VALUE_SIZE),
            )
            tl.store(ended_at, 0)
