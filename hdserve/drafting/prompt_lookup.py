"""Prompt lookup decoding (Saxena 2023), the simplest baseline.

The longest n-gram at the end of the sequence that occurred before is searched for, and what
followed its first occurrence is the draft, one chain.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hdserve.config import StrictModel
from hdserve.core import Sequence, Source
from hdserve.databases.ngram import Ints
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.tree import DraftTree


class PromptLookupOptions(StrictModel):
    """Options of the ``prompt-lookup`` drafter."""

    max_ngram_tokens: int = Field(default=3, ge=1)
    """The longest ending of the text that is searched for in it."""

    max_draft_tokens: int = Field(default=10, ge=1)
    """Longest copy."""


class _Text:
    """The tokens of a sequence as an array, so that a step makes one of new tokens only."""

    def __init__(self) -> None:
        self._tokens: Ints = np.empty(1024, np.int64)
        self._num_tokens = 0

    def after(self, token_ids: list[int]) -> Ints:
        """All of ``token_ids``, which begin with those of the last call."""
        num_tokens = len(token_ids)
        if num_tokens > len(self._tokens):
            before = self._tokens[: self._num_tokens]
            self._tokens = np.empty(2 * num_tokens, np.int64)
            self._tokens[: self._num_tokens] = before
        self._tokens[self._num_tokens : num_tokens] = token_ids[self._num_tokens :]
        self._num_tokens = num_tokens
        return self._tokens[:num_tokens]


class PromptLookup(Drafter):
    """Drafts a copy from the request's own text."""

    name = "prompt-lookup"
    options_model: ClassVar[type[PromptLookupOptions]] = PromptLookupOptions

    def __init__(
        self, resources: DraftResources, options: PromptLookupOptions | None = None
    ) -> None:
        self._options = options or PromptLookupOptions()

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        if not seq.speculation.allows(Source.CONTEXT):
            return
        text = seq.drafter_state.setdefault(self.name, _Text()).after(seq.token_ids)
        for size in range(min(self._options.max_ngram_tokens, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            found = np.flatnonzero((windows == text[-size:]).all(axis=1))
            if len(found):
                begin = int(found[0]) + size
                draft = seq.token_ids[begin : begin + self._options.max_draft_tokens]
                tree.add_path(draft, Source.CONTEXT)
                return

    def finish(self, seq: Sequence) -> None:
        seq.drafter_state.pop(self.name, None)
