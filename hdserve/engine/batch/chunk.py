"""The rows of one sequence in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hdserve.engine.batch.races import Race
from hdserve.engine.kv_cache.segments import Segment
from hdserve.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in one forward: decided tokens, then the drafts that follow the
    last of them.

    Attributes:
        first_column: number of tokens already cached.
        token_ids: decided tokens that are not cached yet, at least one.
        tree: drafts after the last of ``token_ids``, its root; ``None`` when the chunk ends inside
            the prompt, where nothing is to be chosen.
        num_scored_tokens: how many of ``token_ids``, from the first, need logits as well.
        race: in which the forward draws the token after each node of ``tree``, if it shall.
    """

    segment: Segment
    first_column: int
    token_ids: Sequence[int]
    tree: DraftTree | None
    num_scored_tokens: int = 0
    race: Race | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + (self.tree.num_draft_tokens if self.tree else 0)
