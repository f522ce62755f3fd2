"""Held-out loss by kind of text and by position in the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from tools.train_bundled_models.packing import TokenArray

POSITION_BOUNDS = (256, 512, 1024, 2048)
"""Positions are reported in the ranges that end here."""

_ROWS_TOKENS = 2048
"""Tokens of one forward pass, so that the logits stay small."""


@dataclass(slots=True)
class Loss:
    """Sum of the negative log-likelihoods of some tokens."""

    nats: float = 0.0
    num_tokens: int = 0

    @property
    def mean(self) -> float:
        """Nats per token; NaN for no token."""
        return self.nats / self.num_tokens if self.num_tokens else float("nan")

    def add(self, nats: torch.Tensor) -> None:
        """Count the losses of some tokens."""
        self.nats += float(nats.double().sum())
        self.num_tokens += nats.numel()


@dataclass(slots=True)
class HeldOutLoss:
    """Losses over the held-out text."""

    by_kind: dict[str, Loss] = field(default_factory=dict)
    by_position: dict[int, Loss] = field(default_factory=dict)
    """Keyed by the end of the range of positions."""

    overall: Loss = field(default_factory=Loss)


@torch.inference_mode()
def held_out_loss(
    model: PreTrainedModel,
    streams: Mapping[str, TokenArray],
    length_tokens: int,
    max_tokens_per_kind: int | None = None,
) -> HeldOutLoss:
    """Evaluate on the held-out streams, cut into windows that do not overlap.

    Args:
        model: a causal language model; its mode is left as it was.
        streams: held-out tokens of each kind.
        length_tokens: tokens of a window; the first is given, the others are scored.
        max_tokens_per_kind: stop early, for a quick look during training.
    """
    training = model.training
    model.eval()
    result = HeldOutLoss()
    for kind, stream in sorted(streams.items()):
        windows = _windows(stream[:max_tokens_per_kind], length_tokens)
        for rows in torch.split(windows, max(1, _ROWS_TOKENS // length_tokens)):
            _add(result, kind, _token_losses(model, rows.to(model.device)))
    model.train(training)
    return result


def _windows(stream: TokenArray, length: int) -> torch.Tensor:
    """Return windows of shape ``(windows, length + 1)``; a rest shorter than a window is
    dropped."""
    num_windows = (len(stream) - 1) // length
    starts = range(0, num_windows * length, length)
    rows = [stream[start : start + length + 1].astype(np.int64) for start in starts]
    return torch.from_numpy(np.array(rows).reshape(num_windows, length + 1))


def _token_losses(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each next token, in nats, of shape ``(rows,
    length)``."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)


def _add(result: HeldOutLoss, kind: str, losses: torch.Tensor) -> None:
    result.overall.add(losses)
    result.by_kind.setdefault(kind, Loss()).add(losses)
    first = 0
    for end in POSITION_BOUNDS:
        part = losses[:, first:end]
        if part.numel():
            result.by_position.setdefault(end, Loss()).add(part)
        first = end
