"""Hierarchy drafting: context, model and statistics databases merged into one calibrated tree.

After "Hierarchy Drafting" (arXiv 2502.05609): sources in order of temporal locality.  Where the
paper fills a fixed number of chains from one source after the other, here every source votes on
every candidate, an online-learned mixer turns the votes into one probability (``candidates``), and
the tree is grown best first (``growth``).
"""

from __future__ import annotations

from collections.abc import Sequence as Sized

import numpy as np
from pydantic import Field

from hdserve.config import StrictModel
from hdserve.core import Sequence, Source
from hdserve.databases.context import ContextDatabase, ContextPool
from hdserve.databases.model import MODEL_ORDERS, Partition
from hdserve.databases.ngram import Ints, NgramTable
from hdserve.databases.statistics import STATISTICS_ORDERS
from hdserve.drafting.base import Drafter, DraftResources, Forward
from hdserve.drafting.calibration import Calibration
from hdserve.drafting.candidates import (
    CONTEXT,
    MODEL,
    NUM_LEVELS,
    NUM_ORDERS,
    OTHERS,
    STATE_CONTEXT_STAMP,
    STATE_NUM_TOKENS,
    STATE_OUTPUT_START,
    STATE_SIZE,
    STATE_VOCAB_SIZE,
    STATISTICS,
    Databases,
    new_scratch,
)
from hdserve.drafting.growth import NODE_LEVEL, NODE_PARENT, NODE_TOKEN, grow_tree
from hdserve.drafting.learning import commit
from hdserve.tree import Acceptance, DraftTree

CONTEXT_ORDERS = (0, 1, 2, 3, 5)
LEVEL_SOURCES = (Source.CONTEXT, Source.MODEL, Source.MODEL, Source.STATISTICS)


class HierarchyOptions(StrictModel):
    """Options of the ``hierarchy`` drafter."""

    context: bool = True
    """Draft from the request's own text."""

    model: bool = True
    """Draft from what the model generated before."""

    statistics: bool = True
    """Draft from the statistics database."""

    min_score: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Nodes less likely to be accepted than this are not drafted."""

    learning_rate: float = Field(default=0.004, ge=0.0, le=1.0)
    """Step size of the mixer weights; 0 learns nothing."""

    token_bias_rate: float = Field(default=0.05, ge=0.0, le=1.0)
    """Step size of the per-token biases."""

    max_nodes: int = Field(default=256, ge=1, le=1024)
    """Most nodes drafted in one step, whatever the capacity of the tree."""


class _Request:
    """What is kept for one running sequence."""

    __slots__ = ("context", "databases", "levels", "partition", "state", "version")

    def __init__(self, context: ContextDatabase, state: Ints, levels: int) -> None:
        self.context = context
        self.state = state
        self.levels = levels
        self.partition: Partition | None = None
        self.version = -1
        self.databases: Databases


class Hierarchy(Drafter):
    """The default drafter.

    Args:
        resources: the databases to draft from.
        options: see :class:`HierarchyOptions`.
        calibration: what was learned before; default: the prior that ships.
    """

    name = "hierarchy"
    options_model = HierarchyOptions

    def __init__(
        self,
        resources: DraftResources,
        options: HierarchyOptions | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.options = options or HierarchyOptions()
        self.calibration = calibration or Calibration.prior(resources.vocab_size)
        self._resources = resources
        self._pool = ContextPool()
        self._scratch = new_scratch(self.options.max_nodes)
        self._orders = _order_table()
        self._nothing = Partition(1 << 14)
        self._levels = self._available_levels()
        self._learned = self.calibration.learned()

    def _available_levels(self) -> int:
        resources, options = self._resources, self.options
        levels = (1 << CONTEXT) * options.context
        if options.model and resources.model_database is not None:
            levels |= 1 << MODEL
        if options.model and resources.draft_from:
            levels |= 1 << OTHERS
        if options.statistics and resources.statistics is not None:
            levels |= 1 << STATISTICS
        return levels

    def start(self, seq: Sequence) -> None:
        text = list(seq.token_ids)
        prediction = [t for t in seq.speculation.prediction if 0 <= t < self.calibration.vocab_size]
        begin = len(prediction)
        context = ContextDatabase(
            self._pool,
            prediction + text,
            self._orders[CONTEXT],
            begin + max(seq.max_total_tokens, len(text) + 64),
        )
        state = np.zeros(STATE_SIZE, np.int64)
        state[STATE_NUM_TOKENS] = context.num_tokens
        state[STATE_OUTPUT_START] = begin + seq.num_prompt_tokens
        state[STATE_CONTEXT_STAMP] = context.table.stamp
        state[STATE_VOCAB_SIZE] = self.calibration.vocab_size
        request = _Request(context, state, self._levels_of(seq))
        self._connect(request, seq)
        seq.drafter_state[self.name] = request

    def _levels_of(self, seq: Sequence) -> int:
        levels = self._levels
        for level in range(NUM_LEVELS):
            if not seq.speculation.allows(LEVEL_SOURCES[level]):
                levels &= ~(1 << level)
        return levels

    def _connect(self, request: _Request, seq: Sequence) -> None:
        """Note the arrays that ``request`` is drafted for from."""
        database, statistics = self._resources.model_database, self._resources.statistics
        partition = database.partition(seq.namespace) if database else None
        request.partition = partition
        partition = partition or self._nothing
        request.version = partition.version
        others = self._others(seq.namespace)
        empty = self._nothing.table
        context = request.context
        request.databases = Databases(
            tokens=context.tokens,
            heads=context.heads,
            context=context.table.rows,
            context_size=context.size,
            model=partition.table.rows,
            model_size=partition.table.size,
            model_log=partition.log,
            model_heads=partition.heads,
            model_state=partition.log_state,
            others=others.rows,
            others_size=others.size,
            statistics=statistics.rows if statistics else empty.rows,
            statistics_size=statistics.size if statistics else empty.size,
            orders=self._orders,
            state=request.state,
        )

    def _others(self, namespace: str) -> NgramTable:
        for database in self._resources.draft_from:
            partition = database.partition(namespace)
            if partition is not None:
                return partition.table
        return self._nothing.table

    def _refresh(self, request: _Request, seq: Sequence) -> None:
        """Follow arrays that were replaced since the last call."""
        partition = request.partition
        if partition is None or partition.version != request.version:
            self._connect(request, seq)

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        request: _Request = seq.drafter_state[self.name]
        self._refresh(request, seq)
        capacity = min(tree.capacity, self.options.max_nodes)
        if capacity < 1 or request.levels == 0:
            return
        scratch = self._scratch
        num_nodes = grow_tree(
            request.databases,
            self._learned,
            scratch,
            request.levels,
            capacity,
            tree.max_depth,
            self.options.min_score,
        )
        nodes = scratch.nodes[1:num_nodes]
        sources = LEVEL_SOURCES
        tree.add_nodes(
            nodes[:, NODE_TOKEN].tolist(),
            nodes[:, NODE_PARENT].tolist(),
            [sources[level] for level in nodes[:, NODE_LEVEL].tolist()],
            scratch.node_scores[1:num_nodes].tolist(),
        )

    def observe(
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        request: _Request = seq.drafter_state[self.name]
        self._follow(request, seq, acceptance.token_ids)

    def _follow(self, request: _Request, seq: Sequence, token_ids: Sized[int]) -> None:
        context = request.context
        context.continue_prompt()
        if context.is_cramped:
            context.enlarge()
            request.state[STATE_CONTEXT_STAMP] = context.table.stamp
            self._connect(request, seq)
        self._refresh(request, seq)
        options = self.options
        commit(
            request.databases,
            self._learned,
            self._scratch,
            request.levels,
            np.array(token_ids, np.int32),
            options.learning_rate,
            options.token_bias_rate,
        )
        context.num_tokens += len(token_ids)
        self.calibration.num_tokens += len(token_ids)

    def finish(self, seq: Sequence) -> None:
        request: _Request | None = seq.drafter_state.pop(self.name, None)
        if request is not None:
            request.context.release()


def _order_table() -> Ints:
    table = np.full((NUM_LEVELS, NUM_ORDERS), -1, np.int64)
    for level, orders in (
        (CONTEXT, CONTEXT_ORDERS),
        (MODEL, MODEL_ORDERS),
        (OTHERS, MODEL_ORDERS),
        (STATISTICS, STATISTICS_ORDERS),
    ):
        table[level, : len(orders)] = orders
    return table
