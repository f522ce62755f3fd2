"""Token ids to try a model with."""

from __future__ import annotations


def trial_text(num_tokens: int, vocab_size: int) -> list[int]:
    """A text of ``num_tokens`` token ids that are spread over the vocabulary."""
    return [(index * 7919 + 13) % vocab_size for index in range(num_tokens)]
