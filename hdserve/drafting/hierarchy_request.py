"""One running sequence, as the ``hierarchy`` drafter keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hdserve.core import Sequence, Source
from hdserve.databases.context import ContextDatabase
from hdserve.databases.ngram import BUCKET_ROWS, ROWS_PER_BUCKET, Ints
from hdserve.drafting.arrays import (
    STATE_IS_SAMPLED,
    STATE_MAY_END,
    STATE_NOISE_KEY,
    STATE_NUM_EXPECTED,
    STATE_NUM_TOKENS,
    STATE_OUTPUT_START,
    STATE_SIZE,
    STATE_VOCAB_SIZE,
)
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.handles import HandleTable
from hdserve.drafting.sources import NamespaceSources
from hdserve.noise import sequence_key
from hdserve.tree import Acceptance, DraftTree

LEVEL_SOURCES = (
    Source.CONTEXT,
    Source.MODEL,
    Source.MODEL,
    Source.STATISTICS,
    Source.RECYCLED,
)
"""The source of the tokens of each level."""


@dataclass(slots=True, eq=False)
class HierarchyRequest:
    """What is kept for one running sequence.

    Attributes:
        state: numbers for compiled code, see ``STATE_*``.
        is_shared: whether other requests may draft from what the model generates for it.
        levels: those it may be drafted from, one bit each.
        level_sources: the sources of these levels.
        sources_version: of the sources when ``handles`` were made.
        handles: of the arrays of ``context``, of ``state`` and of ``sources``.
        max_added: number of contexts above which the table of ``context`` may be full.
    """

    context: ContextDatabase
    calibration: Calibration
    state: Ints
    is_shared: bool
    levels: int = 0
    level_sources: frozenset[Source] = frozenset()
    sources: NamespaceSources = field(init=False)
    sources_version: int = -1
    handles: HandleTable = field(init=False)
    max_added: int = 0

    def connect(self, sources: NamespaceSources, levels: int) -> None:
        """Let compiled code find the arrays of the request and those of ``sources``."""
        context = self.context
        handles = sources.handles.copy()
        handles.replace_own(
            context.tokens,
            context.places,
            context.table.rows,
            context.size,
            self.state,
            context.last_positions,
        )
        self.handles = handles
        self.max_added = len(context.table.rows) // BUCKET_ROWS * ROWS_PER_BUCKET
        self.levels = levels
        self.level_sources = frozenset(
            source for level, source in enumerate(LEVEL_SOURCES) if levels & (1 << level)
        )
        self.sources = sources  # set last, so that a request with sources is connected

    def is_text_of(self, seq: Sequence) -> bool:
        """Whether as many tokens were appended to the text as were decided."""
        num_expected = self.state.item(STATE_NUM_EXPECTED)
        return self.context.num_tokens - num_expected == len(seq.token_ids)

    def count_tree(self, tree: DraftTree, acceptance: Acceptance) -> None:
        """Learn how useful scores were: those of nodes from this request's levels, except scores of
        1, which are not estimates."""
        expected_tokens, num_accepted = 0.0, 0
        own_sources, path = self.level_sources, acceptance.path
        for node, score in enumerate(tree.scores):
            if 0.0 < score < 1.0 and tree.sources[node] in own_sources:
                expected_tokens += score
                num_accepted += node in path
        if expected_tokens > 0.0:
            self.calibration.count_tree(expected_tokens, num_accepted)


def new_state(seq: Sequence, num_expected: int, vocab_size: int, *, uses_noise: bool) -> Ints:
    """The initial numbers for compiled code of a sequence, except those of its context's
    table.

    Args:
        num_expected: tokens of the expected answer, which are before the prompt.
        uses_noise: whether to include the noise of sampled choices.
    """
    state = np.zeros(STATE_SIZE, np.int64)
    state[STATE_NUM_TOKENS] = num_expected + len(seq.token_ids)
    state[STATE_OUTPUT_START] = num_expected + seq.num_prompt_tokens
    state[STATE_VOCAB_SIZE] = vocab_size
    state[STATE_NUM_EXPECTED] = num_expected
    state[STATE_MAY_END] = not (seq.params.ignore_eos or seq.params.min_tokens)
    is_sampled = not seq.params.is_greedy and seq.recorded_token_ids is None
    if is_sampled and uses_noise:
        state[STATE_IS_SAMPLED] = 1
        state[STATE_NOISE_KEY] = sequence_key(seq.params.seed, seq.choice_index)
    return state
