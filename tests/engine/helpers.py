"""Engines of the tests of steps, and what requests give alone."""

from __future__ import annotations

from typing import Any

from hdserve import core
from hdserve.drafting.base import Drafter, Forward
from hdserve.engine.tokenization.tokenizer import load_tokenizer
from hdserve.tree import Acceptance, DraftTree
from tests.drafters import OracleDrafter
from tests.engines import make_engine, make_sequence, run

TOKENIZER = load_tokenizer("hdserve-tiny")
GREEDY: dict[str, Any] = {"temperature": 0.0}
SMALL: dict[str, Any] = {"kv_cache_tokens": 512, "max_num_sequences": 6}
"""Options of an engine whose warm-up, where all rows attend in one call, is of fewer rows, which
attend to fewer keys."""


class RecordingDrafter(Drafter):
    """Notes what it is told, and drafts what it was given."""

    name = "recording"
    needs_hidden = True

    def __init__(self, futures: dict[str, list[int]]) -> None:
        self._oracle = OracleDrafter(futures)
        self.calls: list[tuple[str, str]] = []
        self.observed: list[tuple[DraftTree, Acceptance, list[int], Forward]] = []

    def start(self, seq: core.Sequence) -> None:
        assert seq.num_output_tokens == 0
        self.calls.append(("start", seq.request_id))

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        self.calls.append(("propose", seq.request_id))
        assert tree.token_ids == [seq.token_ids[-1]]
        assert 0 < tree.max_depth < seq.num_remaining_tokens, "drafts beyond the end are waste"
        self._oracle.propose(seq, tree)

    def observe(
        self,
        seq: core.Sequence,
        tree: DraftTree,
        acceptance: Acceptance,
        forward: Forward | None,
    ) -> None:
        assert forward is not None
        self.calls.append(("observe", seq.request_id))
        self.observed.append((tree, acceptance, list(seq.token_ids), forward))

    def finish(self, seq: core.Sequence) -> None:
        assert seq.finish_reason is not None
        self.calls.append(("finish", seq.request_id))


def plain(prompt: list[int], **params: Any) -> core.Sequence:
    """What a request gives alone and without drafts."""
    seq = make_sequence("a", prompt, **params)
    run(make_engine(), [seq])
    return seq
