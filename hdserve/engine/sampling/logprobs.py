"""The log probabilities of tokens, from the raw logits of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hdserve.core import TokenLogprob
from hdserve.engine.sampling.topk import topk

_NUM_CANDIDATES = 64
"""How many of the likeliest tokens are fetched from the device at once: bfloat16 has so few
significant bits that many may tie with the last alternative."""

_NUM_AT_ONCE = 1 << 18
"""Logits that are processed at once on a CPU, but at least a row: in float64 they stay in the
caches."""


def chosen_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """The log probability of one token per row of raw logits, ``[rows, vocab_size]``, and the
    ``num_top`` likeliest, in float64; fetched from the device in one transfer.

    Alternatives are in order of probability, ties by token id.  NaN is never an alternative.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return []
    on_cpu = max(1, _NUM_AT_ONCE // vocab_size)
    at_once = on_cpu if logits.device.type == "cpu" else num_rows
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    parts = zip(torch.split(logits, at_once), torch.split(tokens, at_once), strict=True)
    found = torch.cat([_found(rows, of_rows, num_top) for rows, of_rows in parts])
    scores = zip(token_ids, found.cpu().numpy(), logits, strict=True)
    return [_score(token, numbers, row, num_top) for token, numbers, row in scores]


def _found(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    """Per row of ``logits``, in float64: the log probability of its one of ``tokens``; then, if
    alternatives are wanted, the log probabilities and the ids of some of the likeliest, in order.

    These are looked for among the logits, of which a larger one is never less likely.
    """
    logprobs = _float64_logprobs(logits)
    chosen = logprobs.gather(1, tokens)
    if not num_top:
        return chosen
    largest, indices = topk(logits, min(max(num_top, _NUM_CANDIDATES), logits.shape[1]))
    values = logprobs.gather(1, indices).masked_fill_(largest.isneginf(), -torch.inf)
    return torch.cat((chosen, values, indices.double()), dim=1)


def _score(
    token_id: int, found: npt.NDArray[np.float64], logits: torch.Tensor, num_top: int
) -> TokenLogprob:
    """
    Args:
        found: see :func:`_found`.
        logits: of the row; if ``found`` may lack some tokens as likely as the last alternative, all
            are searched for here.
    """
    top: list[tuple[float, int]] = []
    if num_top:
        values, tokens = np.split(found[1:], 2)
        if not values[-1] < values[:num_top][-1]:
            logprobs = _float64_logprobs(logits)
            least = logprobs.topk(min(num_top, len(logprobs))).values[-1]
            candidates = (logprobs >= least).nonzero()[:, 0]
            both = torch.stack((logprobs[candidates], candidates.double())).cpu().numpy()
            values, tokens = both[0], both[1]
        order = np.lexsort((tokens, -values))[:num_top]
        top = [*zip(values[order].tolist(), tokens[order].astype(int).tolist(), strict=True)]
    return TokenLogprob(token_id, float(found[0]), tuple((token, value) for value, token in top))


def _float64_logprobs(logits: torch.Tensor) -> torch.Tensor:
    return _without_nan(logits.double()).log_softmax(dim=-1)


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
    """``logits`` with NaN at minus infinity, as choosing takes them."""
    return logits.masked_fill(logits.isnan(), -torch.inf)
