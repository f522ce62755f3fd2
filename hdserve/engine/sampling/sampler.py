"""From logits to tokens: one choice, greedy or sampled, that depends only on its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import torch

from hdserve.core import SamplingParams
from hdserve.engine import gpu_kernels
from hdserve.engine.batch.races import Race, races_on
from hdserve.engine.kernels.draw import BLOCK, NO_TOKEN, NUM_BINS, draw_token
from hdserve.engine.sampling.topk import argmax, can_be_read
from hdserve.noise import noise_word

_NUM_TOP_CANDIDATES = 256
_NUM_SORTED = 1 << 21
"""Probabilities processed at once, at least a row: sorting takes several times their memory."""

_HIGHEST_INVERSE_TEMPERATURE = 1e30
_BYTES_OF_DOUBLE = 8

_noise_words: Any = noise_word
"""Integer tensors are also of this type."""


def choose(logits: torch.Tensor, params: SamplingParams, keys: Sequence[int]) -> torch.Tensor:
    """Choose one token per row.

    In a sampled row the token that arrives first is chosen (:mod:`hdserve.noise`), which does not
    depend on the other rows.  Tokens exactly as likely as the last one that ``top_k`` or ``top_p``
    keeps are kept too.  Logits that are not finite, from a model that overflowed, give some token
    or :data:`~hdserve.engine.kernels.draw.NO_TOKEN`, so that no other sequence is affected.

    Args:
        logits: ``[rows, vocab_size]``, penalties and biases applied.
        keys: of the position of each row, see :mod:`hdserve.noise`; not read when greedy.

    Returns:
        ``[rows]`` int64.
    """
    if params.is_greedy:
        return argmax(logits)
    if can_be_read(logits, torch.float32):
        return torch.tensor(_drawn(logits, params, keys))
    if not params.has_filters and gpu_kernels.are_available(logits.device):
        from hdserve.engine.gpu_kernels.choices import find_and_draw

        race = Race(keys, inverse_temperature(params))
        races = races_on(logits.device, len(logits), [(slice(len(logits)), race)])
        return find_and_draw(logits, 1, races)[1, :, 1].view(torch.int32).long()
    keys_of_rows = torch.tensor(keys, dtype=torch.int64, device=logits.device)
    weights = filtered_probabilities(logits, params)
    tokens = (weights / _exponentials(keys_of_rows, logits.shape[-1])).argmax(dim=-1)
    found = weights.gather(1, tokens[:, None])[:, 0]  # positive, or not finite
    return torch.where(found > 0, tokens, NO_TOKEN)


def inverse_temperature(params: SamplingParams) -> float:
    """Of a sampled choice; it overflows no float32."""
    return min(1.0 / float(params.temperature), _HIGHEST_INVERSE_TEMPERATURE)


def _exponentials(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``[rows, vocab_size]`` float64: the noise of all tokens, as :mod:`hdserve.noise` has it."""
    token_ids = torch.arange(vocab_size, device=keys.device)
    words: torch.Tensor = _noise_words(keys[:, None], token_ids)
    return -torch.log1p((words.double() + 0.5) * -(2.0**-32))


def choose_one(logits: torch.Tensor, params: SamplingParams, key: int) -> int:
    """Choose the token of a single row, ``[1, vocab_size]``, as :func:`choose` does."""
    if params.is_greedy or not can_be_read(logits, torch.float32):
        return int(choose(logits, params, [key]))
    return _drawn(logits, params, [key])[0]


def choose_checked(
    logits: torch.Tensor, shaped: torch.Tensor, params: SamplingParams, key: int
) -> tuple[int, bool]:
    """Choose the token of a single row of ``shaped``, which was computed from raw ``logits``, both
    ``[1, vocab_size]``, as :func:`choose` does.

    Returns:
        The token, and whether it is valid: there is one, its raw logit is finite, and its shaped
        logit is above minus infinity; it may be infinite by a bias.  Both come from the device in
        one transfer.
    """
    if can_be_read(logits, torch.float32) and can_be_read(shaped, torch.float32):
        token_id = choose_one(shaped, params, key)
        raw, made = (float(each.numpy()[0, token_id]) for each in (logits, shaped))
    else:
        token = choose(shaped, params, [key])
        column = token.clamp(min=0)[:, None]
        numbers = [each.gather(1, column)[0].double() for each in (logits, shaped)]
        found, raw, made = torch.cat((token.double(), *numbers)).tolist()
        token_id = int(found)
    return token_id, token_id != NO_TOKEN and isfinite(raw) and made > -inf


def _drawn(logits: torch.Tensor, params: SamplingParams, keys: Sequence[int]) -> list[int]:
    """Choose one token per row by a kernel; weights below 1e-38 of the likeliest count as 0.

    The request's values are converted to the types the kernel was compiled for: for other types it
    would be compiled again while everybody waits.
    """
    num_rows, num_columns = logits.shape
    num_padded = -(-num_columns // BLOCK) * BLOCK
    scratch = torch.empty(2 * (num_padded + NUM_BINS))
    sums_at = scratch.data_ptr()
    scratch_at = sums_at + NUM_BINS * _BYTES_OF_DOUBLE
    top_k = min(int(params.top_k), num_columns)
    shape = inverse_temperature(params), top_k, float(params.top_p), float(params.min_p)
    first, row_bytes = logits.data_ptr(), num_columns * logits.element_size()
    return [
        draw_token(
            first + row * row_bytes,
            num_columns,
            *shape,
            keys[row],
            scratch_at,
            sums_at,
        )
        for row in range(num_rows)
    ]


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that is sampled from, ``[rows, vocab_size]`` float64, not normalised.

    Temperature, then ``top_k``, ``top_p`` (of what ``top_k`` left) and ``min_p``.
    """
    shifted = logits.double() - logits.max(dim=-1, keepdim=True).values  # cannot overflow
    scaled = shifted / max(float(params.temperature), 1 / _HIGHEST_INVERSE_TEMPERATURE)
    top_k, top_p, min_p = int(params.top_k), float(params.top_p), float(params.min_p)
    if 0 < top_k < scaled.shape[-1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    least_kept = torch.zeros_like(probabilities[:, :1])
    if top_p < 1.0:
        least_kept = torch.maximum(least_kept, _nucleus_threshold(probabilities, top_p))
    if min_p > 0.0:
        likeliest = probabilities.max(dim=-1, keepdim=True).values
        least_kept = torch.maximum(least_kept, likeliest * min_p)
    return probabilities.masked_fill(probabilities < least_kept, 0.0)


def _nucleus_threshold(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """``[rows, 1]``: the smallest probability in the smallest set whose sum reaches ``top_p``."""
    num_candidates = min(_NUM_TOP_CANDIDATES, probabilities.shape[-1])
    largest = probabilities.topk(num_candidates, dim=-1).values
    thresholds = _threshold_of_sorted(largest, top_p)
    flat = (largest.sum(dim=-1) < top_p).nonzero()[:, 0]
    at_once = max(1, _NUM_SORTED // probabilities.shape[-1])
    for first in range(0, len(flat), at_once):
        part = flat[first : first + at_once]
        whole = probabilities[part].sort(dim=-1, descending=True).values
        thresholds[part] = _threshold_of_sorted(whole, top_p)
    return thresholds


def _threshold_of_sorted(descending: torch.Tensor, top_p: float) -> torch.Tensor:
    num_before = (descending.cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)
    return descending.gather(-1, num_before.clamp(max=descending.shape[-1] - 1))
