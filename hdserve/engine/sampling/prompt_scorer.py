"""The log probabilities of the tokens of a prompt."""

from __future__ import annotations

from operator import index

import torch

from hdserve import core
from hdserve.core import TokenLogprob
from hdserve.engine.sampling.logprobs import token_logprobs

_ROWS_AT_ONCE = 16
"""Rows that are scored at once, so that copies of their logits stay small even for large
vocabularies."""


class PromptScorer:
    """Scores the tokens of one prompt in order, as their rows come out of the model.

    The first token follows nothing, so it has no score.

    Raises:
        TypeError: the number of alternatives is not an integer.
    """

    def __init__(self, seq: core.Sequence) -> None:
        self._seq = seq
        self._num_top = index(seq.params.prompt_logprobs or 0)
        self._found: list[TokenLogprob | None] = [None]

    def push(self, logits: torch.Tensor) -> None:
        """Score the next tokens, one for each row of ``logits``, ``[rows, vocab_size]``.

        Raises:
            TypeError: a token id is not an integer.
        """
        for rows in torch.split(logits, _ROWS_AT_ONCE):
            first = len(self._found)
            token_ids = [index(token) for token in self._seq.token_ids[first : first + len(rows)]]
            self._found += token_logprobs(rows, token_ids, self._num_top)

    def finish(self) -> tuple[TokenLogprob | None, ...]:
        """One entry per token of the prompt, shared with its other choices; or the result one of
        them already has."""
        shared = self._seq.prompt_scores or core.PromptScores()
        if shared.found is None:
            assert len(self._found) == self._seq.num_prompt_tokens, "a row of the prompt is missing"
            shared.found = tuple(self._found)
        return shared.found
