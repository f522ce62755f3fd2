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
from hdserve.drafting.base import Drafter, DraftResources
from hdserve.tree import DraftTree


class PromptLookupOptions(StrictModel):
    """Options of the ``prompt-lookup`` drafter."""

    max_ngram_tokens: int = Field(default=3, ge=1)
    """The longest ending of the text that is searched for in it."""

    max_draft_tokens: int = Field(default=10, ge=1)
    """Longest copy."""


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
        text = np.array(seq.token_ids, np.int64)
        for size in range(min(self._options.max_ngram_tokens, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
            found = np.flatnonzero((windows == text[-size:]).all(axis=1))
            if len(found):
                begin = int(found[0]) + size
                draft = seq.token_ids[begin : begin + self._options.max_draft_tokens]
                tree.add_path(draft, Source.CONTEXT)
                return
