"""Hierarchy drafting: context, model and statistics databases merged into one calibrated tree.

After "Hierarchy Drafting" (arXiv 2502.05609): sources in order of temporal locality.  Where the
paper fills a fixed number of chains from one source after the other, here every source votes on
every candidate, an online-learned mixer turns the votes into one probability (``candidates``), and
the tree is grown best first (``growth``).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from hdserve.config import StrictModel
from hdserve.core import SamplingParams, Sequence, Source
from hdserve.databases.context import ContextDatabase, ContextPool
from hdserve.databases.model import MODEL_ORDERS, ModelDatabase, Partition
from hdserve.databases.ngram import BUCKET_ROWS, ROWS_PER_BUCKET, Ints, NgramTable
from hdserve.databases.statistics import STATISTICS_ORDERS
from hdserve.drafting.arrays import (
    CONTEXT,
    MODEL,
    NODE_DEPTH,
    NODE_LEVEL,
    NODE_PARENT,
    NODE_TOKEN,
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
from hdserve.drafting.base import Drafter, DraftResources, Forward
from hdserve.drafting.calibration import Calibration, merge_states
from hdserve.drafting.growth import grow_tree
from hdserve.drafting.handles import handle_table
from hdserve.drafting.learning import commit
from hdserve.errors import SnapshotError
from hdserve.tree import Acceptance, DraftTree

CONTEXT_ORDERS = (0, 1, 2, 3)
MAX_CALIBRATIONS = 256
"""Namespaces whose calibration is kept; beyond it the one not used for longest starts anew."""

MIN_NEW_TOKENS = 1000
"""A calibration is worth sharing when it has learned from so many more tokens."""

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

    learning_rate: float = Field(default=0.002, ge=0.0, le=1.0)
    """Step size of the mixer weights; 0 learns nothing."""

    token_bias_rate: float = Field(default=0.05, ge=0.0, le=1.0)
    """Step size of the per-token biases."""

    max_nodes: int = Field(default=256, ge=1, le=1024)
    """Most nodes drafted in one step, whatever the capacity of the tree."""


class _Request:
    """What is kept for one running sequence."""

    __slots__ = (
        "calibration",
        "context",
        "databases",
        "handles",
        "levels",
        "max_added",
        "partition",
        "state",
        "version",
    )

    def __init__(
        self, context: ContextDatabase, calibration: Calibration, state: Ints, levels: int
    ) -> None:
        self.context = context
        self.calibration = calibration
        self.state = state
        self.levels = levels
        self.partition: Partition | None = None
        self.version = -1
        self.databases: Databases
        self.handles: Ints
        self.max_added = 0


class Hierarchy(Drafter):
    """The default drafter.

    Args:
        resources: the databases to draft from.
        options: see :class:`HierarchyOptions`.
    """

    name = "hierarchy"
    options_model: ClassVar[type[HierarchyOptions]] = HierarchyOptions

    def __init__(self, resources: DraftResources, options: HierarchyOptions | None = None) -> None:
        self.options = options or self.options_model()
        self._resources = resources
        self._pool = ContextPool()
        self._scratch = new_scratch(self.options.max_nodes)
        self._scratch_handles = handle_table(self._scratch)
        self._orders = _order_table()
        self._nothing = Partition(1 << 14)
        self._levels = self._available_levels()
        self._calibrations: dict[str, Calibration] = {}
        self._num_shared_tokens: dict[str, int] = {}

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

    def calibration(self, namespace: str) -> Calibration:
        """What was learned from the requests of a namespace; begins with the prior."""
        calibration = self._calibrations.pop(namespace, None)
        if calibration is None:
            calibration = Calibration.prior(self._resources.vocab_size)
        self._calibrations[namespace] = calibration
        if len(self._calibrations) > MAX_CALIBRATIONS:
            del self._calibrations[next(iter(self._calibrations))]
        return calibration

    def state(self, namespace: str) -> bytes | None:
        calibration = self.calibration(namespace)
        if calibration.num_tokens - self._num_shared_tokens.get(namespace, 0) < MIN_NEW_TOKENS:
            return None
        self._num_shared_tokens[namespace] = calibration.num_tokens
        return calibration.to_bytes()

    @classmethod
    def merge_states(cls, kept: bytes, new: bytes) -> bytes:
        return merge_states(kept, new)

    def adopt(self, namespace: str, state: bytes) -> None:
        """Take over a state from :meth:`Calibration.to_bytes`, for sequences started from now on.

        Raises:
            SnapshotError: it is corrupt, of another version or of another vocabulary.
        """
        calibration = Calibration.from_bytes(state)
        if calibration.vocab_size != self._resources.vocab_size:
            raise SnapshotError("the calibration is of another vocabulary")
        self._calibrations[namespace] = calibration
        self._num_shared_tokens[namespace] = calibration.num_tokens

    def warm_up(self) -> None:
        """Compile, or load what an earlier run of this machine compiled."""
        database = ModelDatabase(1 << 16)
        database.insert("", range(16))
        drafter = Hierarchy(DraftResources(vocab_size=64, model_database=database), self.options)
        seq = Sequence("", list(range(16)), SamplingParams())
        drafter.start(seq)
        tree = DraftTree(seq.token_ids[-1], 4)
        drafter.propose(seq, tree)
        seq.token_ids.append(0)
        drafter.observe(seq, tree, Acceptance((0,), (0,)), None)
        drafter.finish(seq)

    def start(self, seq: Sequence) -> None:
        calibration = self.calibration(seq.namespace)
        expected = [t for t in seq.speculation.prediction if 0 <= t < calibration.vocab_size]
        text = [*expected, *seq.token_ids]
        num_tokens = len(expected) + max(seq.max_total_tokens, len(seq.token_ids))
        context = ContextDatabase(self._pool, text, self._orders[CONTEXT], num_tokens)
        state = np.zeros(STATE_SIZE, np.int64)
        state[STATE_NUM_TOKENS] = len(text)
        state[STATE_OUTPUT_START] = len(expected) + seq.num_prompt_tokens
        state[STATE_CONTEXT_STAMP] = context.table.stamp
        state[STATE_VOCAB_SIZE] = calibration.vocab_size
        request = _Request(context, calibration, state, self._levels_of(seq))
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
        request.partition = database.partition(seq.namespace) if database else None
        partition = request.partition or self._nothing
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
        request.handles = handle_table(request.databases)
        request.max_added = len(context.table.rows) // BUCKET_ROWS * ROWS_PER_BUCKET

    def _others(self, namespace: str) -> NgramTable:
        """The best-ranked table of other models that holds something."""
        for database in self._resources.draft_from:
            partition = database.partition(namespace)
            if partition is not None:
                return partition.table
        return self._nothing.table

    def _refresh(self, request: _Request, seq: Sequence) -> None:
        """Follow arrays that were replaced since the last call."""
        database = self._resources.model_database
        partition = database.partition(seq.namespace) if database else None
        if partition is not request.partition or (
            partition is not None and partition.version != request.version
        ):
            self._connect(request, seq)

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        request: _Request = seq.drafter_state[self.name]
        capacity = min(tree.capacity, self.options.max_nodes)
        if capacity < 1 or request.levels == 0:
            return
        self._refresh(request, seq)
        scratch = self._scratch
        num_nodes = grow_tree(
            request.handles,
            request.calibration.handles,
            self._scratch_handles,
            request.levels,
            capacity,
            tree.max_depth,
            self.options.min_score,
        )
        nodes = scratch.nodes[1:num_nodes, :NODE_DEPTH].T.tolist()
        levels = scratch.nodes[1:num_nodes, NODE_LEVEL].tolist()
        tree.add_nodes(
            nodes[NODE_TOKEN],
            nodes[NODE_PARENT],
            [LEVEL_SOURCES[level] for level in levels],
            scratch.node_scores[1:num_nodes].tolist(),
        )

    def observe(
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        request: _Request = seq.drafter_state[self.name]
        context, num_new = request.context, len(acceptance.token_ids)
        if not context.is_complete:
            context.continue_prompt()
        if not context.has_room(num_new):
            self._enlarge(request, seq, num_new)
        self._refresh(request, seq)
        num_added = commit(
            request.handles,
            request.calibration.handles,
            self._scratch_handles,
            request.levels,
            np.array(acceptance.token_ids, np.int32),
            self.options.learning_rate,
            self.options.token_bias_rate,
        )
        context.num_tokens += num_new
        request.calibration.num_tokens += num_new
        if num_added > request.max_added and context.is_table_full:
            self._enlarge(request, seq, num_new)

    def _enlarge(self, request: _Request, seq: Sequence, num_new: int) -> None:
        """Give a request more room for ``num_new`` tokens and their contexts."""
        request.context.enlarge(num_new)
        request.state[STATE_CONTEXT_STAMP] = request.context.table.stamp
        self._connect(request, seq)

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
