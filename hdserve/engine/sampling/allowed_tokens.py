"""The tokens a request allows, where it names them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hdserve.engine.request_check import check_token_ids


class AllowedTokens:
    """Allows only ``token_ids`` of a vocabulary.

    They may be most of it, so they are read once for all choices of a request, outside the
    engine's thread.

    Raises:
        InvalidRequest: one of them is not in the vocabulary.
    """

    def __init__(self, token_ids: Collection[int], vocab_size: int) -> None:
        check_token_ids("allowed_token_ids", token_ids, vocab_size)
        self._is_allowed = torch.zeros(vocab_size, dtype=torch.bool)
        self._is_allowed[torch.tensor([*token_ids], dtype=torch.int64)] = True
        self._num_tokens = int(self._is_allowed.sum())

    def are_among(self, token_ids: Collection[int]) -> bool:
        """Whether ``token_ids``, all distinct, include every allowed one; they may lie beyond the
        vocabulary."""
        known = [token_id for token_id in token_ids if token_id < len(self._is_allowed)]
        others = torch.tensor(known, dtype=torch.int64)
        return int(self._is_allowed[others].sum()) == self._num_tokens

    def bias(self, device: torch.device) -> torch.Tensor:
        """What is added to the logits, ``[vocab_size]``, as a new tensor."""
        bias = torch.zeros(self._is_allowed.shape, device=device)
        return bias.masked_fill_(~self._is_allowed.to(device), -torch.inf)
