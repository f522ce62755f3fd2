"""Whether a model tells its attention function all that its masks say, and nothing unknown.

Packed attention uses none of the model's masks: it hides what ``sliding_window`` says.  A model
that has its window in the mask only would see too much, noticeable only beyond the window.  Sinks
or biases passed along with queries, keys and values would be ignored, which not every text shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hdserve.engine.attention.packed import ATTENTION_NAME
from hdserve.errors import UnsupportedModel

_PROBE_NAME: Final = "hdserve_mask_probe"
_KNOWN_TENSORS = {"position_ids", "s_aux"}
"""The tensors that packed attention handles besides queries, keys, values and masks.  Positions are
also part of the step's plan."""

_FIRST_MARK = 64
"""Masks are marked with consecutive integers, which bfloat16 holds up to 256."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Probe:
    """What a forward does with masks.

    Attributes:
        num_tokens: of the longest sequence.
        visible: for each mask the model made, which tokens the last one of such a sequence sees.
        looks_ahead: whether a layer says that a token sees those after it.
        changes_masks: whether a layer attends with something else than one of these masks.
        num_misled: layers whose mask disagrees with their ``sliding_window``.
        unknown: names of tensors passed to the attention function that it does not handle.
    """

    num_tokens: int
    visible: list[torch.Tensor] = field(default_factory=list)
    looks_ahead: bool = False
    changes_masks: bool = False
    num_misled: int = 0
    unknown: set[str] = field(default_factory=set)

    def mark(self, sees: MaskFunction) -> int:
        last = torch.tensor(self.num_tokens - 1)
        zero = torch.tensor(0)
        found = sees(zero, zero, last, torch.arange(self.num_tokens))
        self.visible.append(found.expand(self.num_tokens))
        return _FIRST_MARK + len(self.visible) - 1

    def note(self, mask: torch.Tensor, sliding_window: int | None) -> None:
        index = float(mask.flatten()[0]) - _FIRST_MARK
        if index not in range(len(self.visible)):
            self.changes_masks = True
            return
        distances = torch.arange(self.num_tokens - 1, -1, -1)
        told = distances < (self.num_tokens if sliding_window is None else sliding_window)
        self.num_misled += not torch.equal(self.visible[int(index)], told)


_PROBE: Final[ContextVar[_Probe | None]] = ContextVar("hdserve_mask_probe", default=None)


@torch.inference_mode()
def check_masks(module: torch.nn.Module, num_tokens: int) -> None:
    """Compare what the masks of a stock model hide from the last of ``num_tokens`` tokens with what
    its attention function is told, by a forward of one token.

    Raises:
        UnsupportedModel: they differ, or the model looks ahead, changes its masks unnoticed, or
            attends by something else that packed attention does not handle.
    """
    model, name = cast("Any", module), type(module).__name__
    device = next(module.parameters()).device
    with _probing(_Probe(num_tokens)) as probe:
        model.set_attn_implementation(_PROBE_NAME)
        try:
            model(torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
        finally:
            model.set_attn_implementation(ATTENTION_NAME)
    if probe.looks_ahead:
        raise UnsupportedModel(f"{name} lets tokens see those after them")
    if probe.unknown:
        unknown = ", ".join(sorted(probe.unknown))
        raise UnsupportedModel(f"{name} attends by {unknown}, which packed forwards do not know")
    if probe.changes_masks:
        raise UnsupportedModel(
            f"{name} changes the masks of its attention, which packed forwards do not see"
        )
    if probe.num_misled:
        window = min(int(seen.sum()) for seen in probe.visible)
        raise UnsupportedModel(
            f"{name} hides tokens by masks alone, which packed forwards do not see; it can be "
            f"served with a max_model_len of at most {window}"
        )


@contextmanager
def _probing(probe: _Probe) -> Iterator[_Probe]:
    AttentionInterface.register(_PROBE_NAME, _attend)
    AttentionMaskInterface.register(_PROBE_NAME, _make_mask)
    token = _PROBE.set(probe)
    try:
        yield probe
    finally:
        _PROBE.reset(token)


def _make_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **options: Any
) -> torch.Tensor:
    """A mask in the form of eager attention's, filled with the mark of ``mask_function``."""
    probe = _PROBE.get()
    assert probe is not None, "masks are marked within a check"
    with torch.device("cpu"):
        mark = float(probe.mark(mask_function))
    size = (batch_size, 1, q_length, kv_length)
    return torch.full(size, mark, device=options.get("device"))


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Zeros, in the shape of an attention result."""
    probe = _PROBE.get()
    assert probe is not None, "attention is observed within a check"
    probe.looks_ahead |= not getattr(module, "is_causal", True)
    tensors = {key for key, value in others.items() if isinstance(value, torch.Tensor)}
    probe.unknown |= tensors - _KNOWN_TENSORS
    if attention_mask is not None:
        probe.note(attention_mask, sliding_window)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
