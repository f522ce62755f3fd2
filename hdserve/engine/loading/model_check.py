"""Whether a model gives the same results in packed forwards as by itself."""

from __future__ import annotations

from typing import Any, cast

import torch

from hdserve.core import Source
from hdserve.engine.attention.packed import ATTENTION_NAME
from hdserve.engine.batch.chunk import Chunk
from hdserve.engine.forward.model_runner import ModelRunner
from hdserve.engine.kv_cache.segments import Segment
from hdserve.engine.loading.mask_check import check_masks
from hdserve.errors import UnequalResults, UnsupportedModel
from hdserve.tree import DraftTree

_NUM_CACHED_TOKENS = 12
_PATHS = ((4, 5, 6), (4, 7), (8, 9))
_TOLERANCES = {torch.float16: 0.05, torch.bfloat16: 0.1}
_TOLERANCE = 1e-3
_FAULTS = (KeyError, IndexError, TypeError, ValueError, RuntimeError)


def tolerance(dtype: torch.dtype) -> float:
    """By how much logits of the same tokens may differ, relative to their own spread."""
    return _TOLERANCES.get(dtype, _TOLERANCE)


def trial_text(num_tokens: int, vocab_size: int) -> list[int]:
    """A text of ``num_tokens`` token ids that are spread over the vocabulary."""
    return [(index * 7919 + 13) % vocab_size for index in range(num_tokens)]


def check_packed_forward(runner: ModelRunner) -> None:
    """Compare a packed forward of a draft tree with plain forwards of each of its paths.

    So a model whose attention does something that packed attention does not handle is refused
    instead of answering wrongly.

    Raises:
        UnequalResults: the results differ, or it cannot run so at all, which may be due to the
            kernels of ``runner``.
        UnsupportedModel: it cannot be served with any.
    """
    model, cache = runner.model, runner.cache
    name = type(model.module).__name__
    num_cached = min(_NUM_CACHED_TOKENS, model.max_model_len - 1 - max(map(len, _PATHS)))
    if num_cached < 1:
        return  # the context is too short to try
    tokens = trial_text(num_cached + 1, model.vocab_size)
    tree = DraftTree(tokens[-1], sum(map(len, _PATHS)))
    for path in _PATHS:
        tree.add_path([token % model.vocab_size for token in path], Source.OTHER)
    segment = cache.rows.allocate(num_cached + len(tree))
    if segment is None:
        return  # the cache is too small to try
    try:
        packed = _packed_logits(runner, segment, tokens, tree)
        layers = range(cache.shape.num_layers)
        is_written = all(cache.read(layer, segment.start, 1)[0].any() for layer in layers)
    except _FAULTS as error:
        raise UnequalResults(f"{name} cannot be run in packed forwards: {error!r}") from error
    finally:
        cache.rows.free(segment)
    if not is_written:
        raise UnsupportedModel(f"{name} does not call the attention function it is given")
    try:
        plain = _plain_logits(model.module, tokens, tree, model.device)
    except _FAULTS as error:
        reason = f"transformers itself cannot run it: {error!r}"
        raise UnsupportedModel(f"{name}, as its configuration has it: {reason}") from error
    errors = relative_errors(packed, plain)
    # the median, as rounding may send one row of a mixture of experts to another expert
    difference = float(errors.median()) if len(errors) else 0.0
    if difference > tolerance(model.dtype):
        raise UnequalResults(
            f"{name} gives different results in packed forwards (by {difference:.1%}); its "
            "attention does something that is not known here"
        )
    check_masks(model.module, min(model.max_model_len, cache.num_rows))


def _packed_logits(
    runner: ModelRunner, segment: Segment, tokens: list[int], tree: DraftTree
) -> torch.Tensor:
    """``[num_leaves, vocab_size]``, after a forward that fills the cache."""
    num_cached = len(tokens) - 1
    runner.forward([Chunk(segment, 0, tokens[:-1], None)])
    (outputs,) = runner.forward([Chunk(segment, num_cached, tokens[-1:], tree)])
    assert outputs is not None
    return outputs.logits[_leaves(tree)]


@torch.inference_mode()
def _plain_logits(
    module: torch.nn.Module, tokens: list[int], tree: DraftTree, device: torch.device
) -> torch.Tensor:
    """``[num_leaves, vocab_size]``: each leaf after its own path, by the stock model alone.

    Raises:
        UnsupportedModel: it returns logits nobody asked for; packed forwards would use wrong ones.
    """
    model = cast("Any", module)
    model.set_attn_implementation("eager")
    rows = []
    try:
        for leaf in _leaves(tree):
            path = [tree.token_ids[node] for node in tree.path_to(leaf)[1:]]
            token_ids = torch.tensor([tokens + path], device=device)
            last = torch.tensor([token_ids.shape[1] - 1], device=device)
            logits = model(token_ids, use_cache=False, logits_to_keep=last).logits[0]
            if len(logits) != 1:
                raise UnsupportedModel(f"{type(module).__name__} ignores logits_to_keep")
            rows.append(logits[0].float())
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return torch.stack(rows)


def _leaves(tree: DraftTree) -> list[int]:
    return [node for node in range(len(tree)) if node not in tree.parents]


def relative_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """By how much rows of logits differ, relative to the spread of those ``wanted [num_rows,
    vocab_size]``; infinity where ``found`` is not finite.

    If the model gives non-finite logits for some token, other rows may become non-finite too.

    Returns:
        One entry for each row; if some wanted rows are not finite, only for those that are.
    """
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
    errors: torch.Tensor = (found - wanted).norm(dim=-1) / spread
    if not wanted.isfinite().all():
        return errors[errors.isfinite()]
    return errors.nan_to_num(nan=torch.inf)
