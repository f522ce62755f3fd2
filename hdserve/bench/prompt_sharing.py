"""A model database that takes prompts as well as outputs, for replays to compare with projects
that do so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from hdserve.core import Sequence as RequestSequence
from hdserve.databases.model import ModelDatabase

PROMPT_BLOCK_TOKENS = 32

PROMPT_SHARE = 16
"""The hashes of prompts take no more than one part in this many of the bytes of the database, in
addition.  Beyond it those of all prompts but the last are forgotten."""

_HASH_BYTES = sys.getsizeof(sys.hash_info.modulus)


class _Prompts(NamedTuple):
    """The beginnings of the prompts that were inserted in a namespace.

    Attributes:
        partition: the number of its tables; others know nothing of these prompts.
        blocks: a hash for each block, of all tokens up to its end.
    """

    partition: int
    blocks: set[int]

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.blocks) + len(self.blocks) * _HASH_BYTES


class PromptSharingDatabase(ModelDatabase):
    """What one model was told, and generated.

    Args:
        max_bytes: see :class:`~hdserve.databases.model.ModelDatabase`.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        super().__init__(max_bytes)
        self._prompts: dict[str, _Prompts] = {}

    @property
    def num_text_bytes(self) -> int:
        """The bytes of text and of the hashes of prompts."""
        return super().num_text_bytes + self._prompt_bytes

    @property
    def _prompt_bytes(self) -> int:
        return sum(prompts.num_bytes for prompts in self._prompts.values())

    def record(self, seq: RequestSequence) -> None:
        """Add prompt and output of a sequence that has ended, after those that ended before."""
        if seq.speculation.is_output_shared:
            while self.num_put_off_tokens:
                self.catch_up()
            self.insert_prompt(seq.namespace, seq.token_ids[: seq.num_prompt_tokens])
        super().record(seq)

    def insert_prompt(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Add the part of a prompt that does not repeat the beginning of an earlier prompt.

        Prompts are compared in blocks of ``PROMPT_BLOCK_TOKENS`` tokens, so that the history of a
        conversation is counted once and not once per turn.
        """
        known, blocks = self._known_blocks(namespace), _prompt_blocks(token_ids)
        num_known = next((n for n, block in enumerate(blocks) if block not in known), len(blocks))
        self.insert(namespace, token_ids[num_known * PROMPT_BLOCK_TOKENS :])
        partition = self.peek(namespace)
        if partition is None:
            return
        known = self._known_blocks(namespace)  # of another partition, if that was dropped
        known.update(blocks)
        self._prompts[namespace] = _Prompts(partition.number, known)
        if self._prompt_bytes > self.max_bytes // PROMPT_SHARE:
            self._prompts = {namespace: _Prompts(partition.number, {*blocks})}

    def _known_blocks(self, namespace: str) -> set[int]:
        partition, prompts = self.peek(namespace), self._prompts.get(namespace)
        if partition is None or prompts is None or prompts.partition != partition.number:
            return set()
        return prompts.blocks

    def clear(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all."""
        super().clear(namespace)
        if namespace is None:
            self._prompts.clear()
        else:
            self._prompts.pop(namespace, None)


def _prompt_blocks(token_ids: Sequence[int]) -> list[int]:
    """One hash for each whole block, of all tokens up to its end."""
    found, block_hash = [], 0
    for start in range(0, len(token_ids) - PROMPT_BLOCK_TOKENS + 1, PROMPT_BLOCK_TOKENS):
        block_hash = hash((block_hash, *token_ids[start : start + PROMPT_BLOCK_TOKENS]))
        found.append(block_hash)
    return found
