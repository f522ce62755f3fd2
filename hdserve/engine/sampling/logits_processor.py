"""How the tokens of a sequence so far change the logits of its next one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from hdserve.core import SamplingParams
from hdserve.engine.sampling.allowed_tokens import AllowedTokens

_LARGEST = torch.finfo(torch.float32).max


class _Terms(NamedTuple):
    """``[vocab_size]`` each, but for ``ending``."""

    is_seen: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor
    ending: torch.Tensor


def seen_tokens(params: SamplingParams, prompt: Iterable[int]) -> torch.Tensor:
    """What a repetition penalty needs to know of a prompt: each of its tokens once, int64; without
    a penalty nothing."""
    seen = set(prompt) if params.repetition_penalty != 1.0 else set[int]()
    return torch.tensor([*seen], dtype=torch.int64)


class LogitsProcessor:
    """Changes to the logits of one sequence that depend on its tokens so far, or are constant:
    penalties, biases, allowed tokens, and ``min_tokens``.

    Args:
        seen: :func:`seen_tokens` of the prompt.
        ending_token_ids: tokens that ``min_tokens`` forbids at first.
        device: where they take :data:`BYTES_PER_TOKEN` bytes for each token of the vocabulary, from
            their first use until they are set aside.
        allowed: the only tokens that may be chosen; ``None`` for all.
    """

    BYTES_PER_TOKEN: ClassVar = 9

    def __init__(
        self,
        params: SamplingParams,
        seen: torch.Tensor,
        ending_token_ids: Iterable[int],
        vocab_size: int,
        device: torch.device,
        allowed: AllowedTokens | None = None,
    ) -> None:
        self._params, self._allowed = params, allowed
        self._chosen: list[int] = []
        self._seen = seen
        self._ending = sorted(ending_token_ids)
        self._vocab_size, self._device = vocab_size, device

    @cached_property
    def _terms(self) -> _Terms:
        size, device, params = self._vocab_size, self._device, self._params
        is_seen = torch.zeros(size, dtype=torch.bool, device=device)
        chosen = torch.tensor(self._chosen, dtype=torch.int64)
        is_seen[self._seen] = True
        is_seen[chosen] = True
        counts = torch.bincount(chosen, minlength=size).to(device, torch.float32)
        allowed = self._allowed
        bias = torch.zeros(size, device=device) if allowed is None else allowed.bias(device)
        biases = [float(each) for each in params.logit_bias.values()]
        biased = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        bias[biased] += torch.tensor(biases, device=device)
        ending = torch.tensor(self._ending, dtype=torch.int64, device=device)
        return _Terms(is_seen, counts, bias, ending)

    def apply(self, logits: torch.Tensor, *, may_end: bool = False) -> torch.Tensor:
        """The logits of the next token, ``[1, vocab_size]``, as a new tensor.

        Args:
            may_end: allow ending tokens whatever ``min_tokens`` says.
        """
        params, terms = self._params, self._terms
        if params.repetition_penalty != 1.0:
            factor = float(params.repetition_penalty)
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(terms.is_seen, penalised, logits)
        if params.frequency_penalty:
            logits = logits - float(params.frequency_penalty) * terms.counts
        if params.presence_penalty:
            logits = logits - float(params.presence_penalty) * (terms.counts > 0)
        if params.logit_bias or self._allowed is not None:
            logits = logits + terms.bias
        logits = logits.clamp(max=_LARGEST)  # the likeliest, however large
        if len(self._chosen) < params.min_tokens and not may_end:
            logits[:, terms.ending] = -torch.inf
        return logits

    def push(self, token_id: int) -> None:
        """``token_id`` was chosen and is now part of the history."""
        terms = self._terms
        terms.is_seen[token_id] = True
        terms.counts[token_id] += 1
        self._chosen.append(token_id)

    def set_aside(self) -> None:
        """Free the memory on the device until the next use."""
        self.__dict__.pop("_terms", None)
