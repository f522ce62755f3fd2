"""The log probabilities of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index

import torch

from hdserve import core
from hdserve.core import TokenLogprob
from hdserve.engine.sampler import without_nan
from hdserve.engine.top import topk

_ROWS_AT_ONCE = 16
"""Rows that are scored at once, so that copies of their logits stay small with large
vocabularies."""


class PromptScorer:
    """Scores the tokens of one prompt as its rows come out of the model, the first ones first.

    The first token follows nothing, so it has no score.

    Raises:
        TypeError: the number of alternatives is not an integer.
    """

    def __init__(self, seq: core.Sequence) -> None:
        self._seq = seq
        self._num_top = index(seq.params.prompt_logprobs or 0)
        self._found: list[TokenLogprob | None] = [None]

    def push(self, logits: torch.Tensor) -> None:
        """Score as many tokens more as ``logits``, ``[rows, vocab_size]``, has rows.

        Raises:
            TypeError: a token id is not an integer.
        """
        for rows in torch.split(logits, _ROWS_AT_ONCE):
            first = len(self._found)
            token_ids = [index(token) for token in self._seq.token_ids[first : first + len(rows)]]
            self._found += token_logprobs(rows, token_ids, self._num_top)

    def finish(self) -> tuple[TokenLogprob | None, ...]:
        """One entry per token of the prompt, for its other choices, too; or what one of them has
        found."""
        shared = self._seq.prompt_scores or core.PromptScores()
        if shared.found is None:
            assert len(self._found) == self._seq.num_prompt_tokens, "a row of the prompt is missing"
            shared.found = tuple(self._found)
        return shared.found


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> Iterator[TokenLogprob]:
    """The log probability and the rank of one token per row of raw logits, ``[rows, vocab_size]``
    float32, and the ``num_top`` likeliest, in order of probability."""
    logprobs = without_nan(logits).log_softmax(dim=-1)
    tokens = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    values = logprobs.gather(1, tokens)
    ranks = (logprobs >= values).sum(dim=1).tolist()
    top_values, top_tokens = topk(logprobs, min(max(num_top, 1), logprobs.shape[1]))
    rows = zip(top_tokens.tolist(), top_values.tolist(), strict=True)
    found = zip(token_ids, values[:, 0].tolist(), ranks, rows, strict=True)
    for token_id, value, rank, (tops, values_of_tops) in found:
        top = tuple(zip(tops[:num_top], values_of_tops[:num_top], strict=True))
        yield TokenLogprob(token_id, value, top, rank)
