"""Where the answers to prompts begin in a log."""

from __future__ import annotations

import sys
from collections.abc import Sequence

MAX_ANSWERS = 4096
"""The most prompts that are remembered for a namespace."""

_INT_BYTES = sys.getsizeof(sys.hash_info.modulus)
_BYTES_PER_ANSWER = 4 * _INT_BYTES
"""About what one takes: its hash and position, and the dictionary entry."""


def prompt_hash(token_ids: Sequence[int]) -> int:
    """A number that identifies a prompt; a collision with another prompt only costs a wrong
    draft."""
    return hash(tuple(token_ids))


class AnswerPlaces:
    """The position at which the last answer to a prompt begins, by the prompt's hash.

    Args:
        max_bytes: prompts whose last answer is oldest are dropped first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._places: dict[int, int] = {}
        self.limit(max_bytes)

    @property
    def num_bytes(self) -> int:
        """Memory in use, approximately."""
        return len(self._places) * _BYTES_PER_ANSWER

    def limit(self, max_bytes: int) -> None:
        """Take no more than ``max_bytes`` from now on."""
        self._max_answers = min(MAX_ANSWERS, max_bytes // _BYTES_PER_ANSWER)
        self._drop_oldest()

    def note(self, prompt: int, position: int) -> None:
        """Note that the last answer to a prompt of this hash begins at ``position``, above 0."""
        self._places.pop(prompt, None)
        self._places[prompt] = position
        self._drop_oldest()

    def place_of(self, prompt: int) -> int:
        """The position, which the log may have forgotten since; 0 if there is none."""
        return self._places.get(prompt, 0)

    def _drop_oldest(self) -> None:
        while len(self._places) > self._max_answers:
            del self._places[next(iter(self._places))]
