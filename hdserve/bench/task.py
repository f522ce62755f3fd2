"""What a contender of ``hdserve bench engine`` decodes, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hdserve.bench.prompts import EncodedPrompt


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts that are decoded together, each to the same number of tokens.

    Attributes:
        recorded: per prompt the tokens that count as the model's choices; ``None``: it chooses.
    """

    name: str
    prompts: Sequence[EncodedPrompt]
    recorded: Sequence[Sequence[int]] | None = None

    def num_tokens(self, index: int, max_tokens: int) -> int:
        """Return the number of tokens of answer ``index``."""
        if self.recorded is None:
            return max_tokens
        return min(max_tokens, len(self.recorded[index]))

    def total_tokens(self, max_tokens: int) -> int:
        """Return the number of tokens of all answers."""
        return sum(self.num_tokens(index, max_tokens) for index in range(len(self.prompts)))


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tasks are decoded.

    Attributes:
        batch_size: sequences that are decoded together.
        max_tokens: tokens of an answer, unless its record is shorter.
        temperature: 0 is greedy.
    """

    batch_size: int
    max_tokens: int
    temperature: float = 0.0
