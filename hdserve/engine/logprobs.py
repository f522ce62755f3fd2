"""The log probabilities of tokens, from the raw logits of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hdserve.core import TokenLogprob
from hdserve.engine.top import topk


def token_logprob(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """The log probability of ``token_id`` and the ``num_top`` likeliest, from raw logits ``[V]``.

    Alternatives are in order of probability, ties by token id.  What is no number is not chosen.
    """
    logprobs = _without_nan(logits.double()).log_softmax(dim=-1)
    top: list[tuple[int, float]] = []
    if num_top:
        least = logprobs.topk(min(num_top, len(logprobs))).values[-1]
        candidates = (logprobs >= least).nonzero()[:, 0].tolist()
        ranked = sorted((-float(logprobs[token]), token) for token in candidates)[:num_top]
        top = [(token, -negative) for negative, token in ranked]
    return TokenLogprob(token_id, float(logprobs[token_id]), tuple(top))


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> Iterator[TokenLogprob]:
    """The log probability and the rank of one token per row of raw logits, ``[rows, vocab_size]``
    float32, and the ``num_top`` likeliest, in order of probability."""
    logprobs = _without_nan(logits).log_softmax(dim=-1)
    tokens = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    values = logprobs.gather(1, tokens)
    ranks = (logprobs >= values).sum(dim=1).tolist()
    top_values, top_tokens = topk(logprobs, min(max(num_top, 1), logprobs.shape[1]))
    rows = zip(top_tokens.tolist(), top_values.tolist(), strict=True)
    found = zip(token_ids, values[:, 0].tolist(), ranks, rows, strict=True)
    for token_id, value, rank, (tops, values_of_tops) in found:
        top = tuple(zip(tops[:num_top], values_of_tops[:num_top], strict=True))
        yield TokenLogprob(token_id, value, top, rank)


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` with what is no number at minus infinity, as choosing takes it."""
    return logits.masked_fill(logits.isnan(), -torch.inf)
