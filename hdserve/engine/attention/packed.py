"""Attention over packed draft trees, as an attention function of stock transformers models."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from hdserve.engine.batch.python_operator import define_operator
from hdserve.engine.batch.step_context import current_plan
from hdserve.engine.batch.step_plan import Span
from hdserve.engine.kv_cache.cache import KVCache

ATTENTION_NAME: Final = "hdserve_packed"
"""The ``attn_implementation`` of a model that is run in packed forwards."""


def number_layers(module: torch.nn.Module) -> None:
    """Give each layer of a model its number as a tensor: then layers differ in tensors alone, and
    compiled code of one serves all (:mod:`~hdserve.engine.forward.repeated_layers`)."""
    for each in module.modules():
        if isinstance(getattr(each, "layer_idx", None), int):
            each.layer_number = torch.tensor(each.layer_idx)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the rows' keys and values to the cache and let each row attend to its own sequence.

    On a CPU all sequences of few rows are handled by one call of the compiled kernel, the others
    one by one: a mask over the concatenation would cost the square of the batch.  On a GPU one call
    handles all.  Call it within :func:`~hdserve.engine.batch.step_context.running`.

    Args:
        query: ``[1, num_heads, num_rows, head_size]``.
        key, value: ``[1, num_kv_heads, num_rows, head_size]``.
        sliding_window: of this layer; ``None`` sees everything.
        softcap: bound of the scores (Gemma 2); ``None`` for none.
        s_aux: attention sinks, ``[num_heads]``: per head a score that takes its share of the
            attention and contributes no value (gpt-oss); ``None`` for none.

    Returns:
        ``[1, num_rows, num_heads, value_size]`` and no weights.
    """
    is_compiling = torch.compiler.is_dynamo_compiling()
    attend = torch.ops.hdserve.packed_attention if is_compiling else attend_by_plan
    layer = cast("Any", module.layer_number if is_compiling else module.layer_idx)
    arguments = (query, key, value, layer, scaling, sliding_window, softcap, s_aux)
    return cast("torch.Tensor", attend(*arguments)), None


# Without a mask function: to make a mask, a model would search its positions for packed sequences,
# and on a GPU wait for the result.
AttentionInterface.register(ATTENTION_NAME, packed_attention)


def attend_by_plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend as :func:`packed_attention` does, in the layer with the given number.

    An operator takes only tensors and numbers, so it cannot be given the plan; it finds the plan
    where the eager function does.
    """
    plan = current_plan()
    assert plan is not None, "attention is called within a step"
    attend_all = plan.attend_all
    plan.cache.write(layer, plan.kv_rows, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attend_all is not None:
        whole = plan.cache.read_all(layer)
        return attend_all(query, *whole, scale, sliding_window, softcap, sinks)
    if plan.listed is None:
        attended = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    else:
        kernel, columns = plan.listed.kernel, plan.listed.columns
        by_kernel = kernel(layer, query, columns, scale, sliding_window, softcap, sinks)
        attended = by_kernel.to(value.dtype)
    if not plan.spans:
        return attended
    if plan.is_exact:
        query = query.double()
    for span, mask in zip(plan.spans, plan.masks(sliding_window, query), strict=True):
        queries = query.narrow(2, span.first_row, span.chunk.num_rows)
        found = _attend(plan.cache, layer, span, queries, mask, scale, softcap, sinks)
        attended.narrow(1, span.first_row, span.chunk.num_rows).copy_(found.transpose(1, 2))
    return attended


def attend_numbered(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    read_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as :func:`attend_by_plan` does: what the operator does in Python.

    Args:
        layer: its number, int64 ``[]`` on the CPU.
        read_rows: int64, the rows of the result that are read, from 0 on; in others it may hold
            anything.  ``None`` if all are.
    """
    return attend_by_plan(query, key, value, int(layer), scaling, sliding_window, softcap, sinks)


def _like_attended(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    """Shape, dtype and strides of what the operator gives."""
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


define_operator(
    "packed_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor layer, float? scaling, int? sliding_window, "
    "float? softcap, Tensor? sinks, Tensor? read_rows=None) -> Tensor",
    attend_numbered,
    _like_attended,
)


def _attend(
    cache: KVCache,
    layer: int,
    span: Span,
    query: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """PyTorch's own attention of one sequence: ``[1, num_heads, num_rows, value_size]``."""
    keys, values = cache.read(layer, span.chunk.segment.start, span.num_keys)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    is_grouped = keys.shape[1] != query.shape[1]
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        besides = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, besides], dim=-1)
    accurate = torch.promote_types(query.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=accurate)[..., : keys.shape[2]]
    return weights.to(query.dtype) @ values
