"""Hierarchy drafting: context, model and statistics databases merged into one calibrated tree.

After "Hierarchy Drafting" (arXiv 2502.05609): sources in order of temporal locality.  Where the
paper fills a fixed number of chains from one source after the other, here every source votes on
every candidate, an online-learned mixer turns the votes into one probability (``candidates``), and
the tree is grown best first (``growth``).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from hdserve.config import StrictModel
from hdserve.core import SamplingParams, Sequence, Source
from hdserve.databases.context import ContextDatabase, ContextPool
from hdserve.databases.history import MATCH_TOKENS, MAX_MATCH
from hdserve.databases.model import ModelDatabase
from hdserve.databases.recycled import NUM_TOP, RECYCLED_ORDERS
from hdserve.databases.statistics import StatisticsDatabase
from hdserve.drafting.arrays import (
    CONTEXT,
    DRAFTED_TOKEN,
    MODEL,
    NUM_LEVELS,
    OTHERS,
    POINTER_SIZE,
    RECYCLED,
    STATE_CONTEXT_STAMP,
    STATE_POINTERS,
    STATISTICS,
    new_scratch,
)
from hdserve.drafting.base import BatchDrafter, DraftResources, MemoryUsage, Verified
from hdserve.drafting.calibration import Calibration, merge_states
from hdserve.drafting.calibrations import Calibrations
from hdserve.drafting.growth import grow_tree
from hdserve.drafting.handles import HandleTable
from hdserve.drafting.hierarchy_request import LEVEL_SOURCES, HierarchyRequest, new_state
from hdserve.drafting.observing import DecidedStep
from hdserve.drafting.sources import DraftSources, NamespaceSources
from hdserve.tree import Acceptance, DraftTree

LOOKUP_NODES, LOOKUP_DEPTH = 16, 24
"""The size of the tree whose time is measured by source."""

MAX_NODES = 256
"""Most nodes drafted in one step, whatever the capacity of the tree.  A configuration allows no
more."""

_ANSWER_MATCH_TOKENS = 8
"""The match length that an equal prompt counts as; a copy found in the text has 5 at least."""

NUM_LEARNED_LATER = 8
"""Of the tokens that were decoded while no drafts were wanted, at most this many, the last ones,
are learned from.  Learning from a token takes more than twice as long as appending it."""

_BIAS_RATE = 0.05
"""Step size of the biases of tokens and of pairs of them.  A larger one orders the candidates of a
context better, and compares those of different contexts worse (docs/adr/0013)."""

_Decided = tuple[HierarchyRequest, Verified, int]
"""What a step decided for a request, and after how many nodes of the tree, all or none, the
likeliest tokens are kept."""


class HierarchyOptions(StrictModel):
    """Options of the ``hierarchy`` drafter."""

    context: bool = True
    """Draft from the request's own text."""

    model: bool = True
    """Draft from what the model generated before."""

    statistics: bool = True
    """Draft from the statistics database."""

    recycled: bool = True
    """Draft from what the model thought likely after contexts it verified."""

    noise: bool = True
    """Weigh tokens that may be sampled by the noise of their choice, which is known in advance."""

    min_score: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Nodes less likely to be accepted than this are not drafted."""

    learning_rate: float = Field(default=0.002, ge=0.0, le=1.0)
    """Step size of the mixer weights, half of it if statistics are drafted from and no copy is
    followed; 0 learns nothing."""


class _FlatForward:
    """A forward in which every token is equally likely after each of ``num_nodes`` nodes, for
    warming up."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def top_tokens(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        shape = (self._num_nodes, k)
        return np.zeros(shape, np.int64), np.zeros(shape, np.float32)

    def hidden(self, node: int) -> Any:
        raise NotImplementedError


class Hierarchy(BatchDrafter):
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
        self._scratch = new_scratch(MAX_NODES)
        self._scratch_handles = HandleTable(self._scratch)
        self._sources = DraftSources(resources)
        self._levels = self._available_levels()
        self._calibrations = Calibrations(resources.vocab_size, self._sources.forget)
        self._contexts: set[ContextDatabase] = set()
        self._copies: set[Calibration] = set()
        """Calibrations that end with their requests."""
        self._num_top = min(NUM_TOP, resources.vocab_size)

    def _available_levels(self) -> int:
        resources, options = self._resources, self.options
        levels = (1 << CONTEXT) * options.context
        if options.model and resources.model_database is not None:
            levels |= 1 << MODEL
        if options.model and resources.draft_from:
            levels |= 1 << OTHERS
        if options.statistics and resources.statistics is not None:
            levels |= 1 << STATISTICS
        if options.recycled and resources.model_database is not None:
            levels |= 1 << RECYCLED
        return levels

    def calibration(self, namespace: str) -> Calibration:
        """What was learned from the requests of a namespace; starts with the prior."""
        return self._calibrations.use(namespace)

    def state(self, namespace: str) -> bytes | None:
        return self._calibrations.state(namespace)

    @classmethod
    def merge_states(cls, kept: bytes, new: bytes) -> bytes:
        return merge_states(kept, new)

    @classmethod
    def shrink_state(cls, state: bytes, max_bytes: int) -> bytes:
        return Calibration.from_bytes(state).to_bytes(max_bytes)

    def adopt(self, namespace: str, state: bytes) -> None:
        """Take over a state from :meth:`Calibration.to_bytes`, for running sequences too.

        Raises:
            SnapshotError: it is corrupt, of another version or of another vocabulary.
        """
        self._calibrations.adopt(namespace, state)

    def forget(self, namespace: str) -> None:
        self._calibrations.forget(namespace)
        self._sources.forget(namespace)

    def warm_up(self) -> None:
        """Compile, or load what an earlier run on this machine compiled."""
        database = ModelDatabase(1 << 16)
        database.insert("", range(16))
        drafter = Hierarchy(DraftResources(vocab_size=64, model_database=database), self.options)
        seq = Sequence("", list(range(16)), SamplingParams())
        drafter.start(seq)
        tree = DraftTree(seq.token_ids[-1], 4)
        drafter.propose(seq, tree)
        seq.token_ids.append(0)
        drafter.observe(seq, tree, Acceptance((0,), (0,)), _FlatForward(len(tree)))
        request: HierarchyRequest = seq.drafter_state[drafter.name]
        request.context.enlarge_table()
        drafter.finish(seq)
        partition = database.partition("")
        assert partition is not None, "a text was inserted"
        partition.table.warm_up()

    def use_statistics(self, statistics: StatisticsDatabase | None) -> None:
        self._resources = replace(self._resources, statistics=statistics)
        self._sources.use_statistics(statistics)
        self._levels = self._available_levels()

    def start(self, seq: Sequence) -> None:
        self._sources.catch_up()
        calibration = self._calibration_of(seq)
        expected = [t for t in seq.speculation.prediction if 0 <= t < calibration.vocab_size]
        if expected:  # it follows a copy of the prompt's end, so that its beginning is found
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            expected = [*prompt[-MATCH_TOKENS:], *expected]
        text = [*expected, *seq.token_ids]
        num_tokens = len(expected) + max(seq.max_total_tokens, len(seq.token_ids))
        context = ContextDatabase(self._pool, text, self._sources.orders[CONTEXT], num_tokens)
        state = new_state(seq, len(expected), calibration.vocab_size, uses_noise=self.options.noise)
        state[STATE_CONTEXT_STAMP] = context.table.stamp
        request = HierarchyRequest(context, calibration, state, self._is_shared(seq))
        self._connect(request, seq)
        self._follow_answer(request, seq)
        seq.drafter_state[self.name] = request
        calibration.num_requests += 1
        self._contexts.add(context)
        if not seq.speculation.is_output_shared:
            self._copies.add(calibration)

    def _follow_answer(self, request: HierarchyRequest, seq: Sequence) -> None:
        """If the same prompt was answered before, and what was decided meanwhile is the beginning
        of that answer, draft the rest of it: for retries and further choices.  It counts as a copy
        with a match of ``_ANSWER_MATCH_TOKENS`` before the answer."""
        database = self._resources.model_database
        if database is None or not request.levels & (1 << MODEL):
            return
        prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids
        place = database.answer_place(seq.namespace, prompt, output)
        if place:
            num_matching = min(_ANSWER_MATCH_TOKENS + len(output), MAX_MATCH)
            first = STATE_POINTERS + POINTER_SIZE
            request.state[first : first + POINTER_SIZE] = place, num_matching, 0

    def _is_shared(self, seq: Sequence) -> bool:
        """Whether other requests may draft from what the model generates for ``seq``."""
        is_shared = self._resources.shares_output and seq.speculation.is_output_shared
        return is_shared and self._resources.model_database is not None

    def _calibration_of(self, seq: Sequence) -> Calibration:
        """The calibration that ``seq`` learns in.  If the request must leave nothing behind, this
        is a copy that ends with it, because biases reveal which tokens there were."""
        calibration = self.calibration(seq.namespace)
        return calibration if seq.speculation.is_output_shared else calibration.copy()

    def _levels_of(self, seq: Sequence, sources: NamespaceSources) -> int:
        levels = self._levels
        for level in range(NUM_LEVELS):
            if not seq.speculation.allows(LEVEL_SOURCES[level]):
                levels &= ~(1 << level)
        if sources.recycled is None:
            levels &= ~(1 << RECYCLED)
        return levels

    def _connect(self, request: HierarchyRequest, seq: Sequence) -> None:
        """Draft for ``request`` from the arrays that exist now."""
        sources = self._sources.of(seq.namespace)
        request.connect(sources, self._levels_of(seq, sources))

    def _refresh(self, request: HierarchyRequest, seq: Sequence, version: int) -> None:
        """Use new arrays if some were replaced, which the version of the sources tells."""
        if request.sources_version != version:
            if request.sources is not self._sources.of(seq.namespace, request.sources):
                self._connect(request, seq)
            request.sources_version = version

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        request: HierarchyRequest = seq.drafter_state[self.name]
        if not request.is_text_of(seq):
            request = self._restart(seq)
        capacity = min(tree.capacity, MAX_NODES)
        num_certain = tree.num_draft_tokens
        if capacity <= num_certain:
            return
        self._refresh(request, seq, self._sources.version)
        if request.levels == 0:
            return
        scratch = self._scratch
        min_score = max(self.options.min_score, tree.min_score)
        if num_certain:
            scratch.drafted[DRAFTED_TOKEN, :num_certain] = tree.token_ids[1:]
        num_nodes = self._grow(
            request, request.levels, capacity, tree.max_depth, min_score, num_certain
        )
        tokens, parents, depths, levels = scratch.drafted[:, num_certain : num_nodes - 1].tolist()
        tree.add_behind(
            tokens,
            parents,
            [*map(LEVEL_SOURCES.__getitem__, levels)],
            scratch.node_scores[1 + num_certain : num_nodes].tolist(),
            depths,
        )

    def _restart(self, seq: Sequence) -> HierarchyRequest:
        """Begin anew with a sequence whose last tokens were lost when a step could not be learned
        from, for example for lack of memory."""
        self.finish(seq)
        self.start(seq)
        request: HierarchyRequest = seq.drafter_state[self.name]
        return request

    def _grow(
        self,
        request: HierarchyRequest,
        levels: int,
        capacity: int,
        max_depth: int,
        min_score: float,
        num_certain: int = 0,
    ) -> int:
        """Grow a tree in ``scratch``; returns its number of nodes, the root included."""
        num_nodes: int = grow_tree(
            request.handles.address,
            request.calibration.handles.address,
            self._scratch_handles.address,
            levels,
            capacity,
            max_depth,
            min_score,
            request.calibration.scale,
            num_certain,
        )
        return num_nodes

    def lookup_times_s(self, seq: Sequence) -> dict[Source, float]:
        """How long it takes to grow a tree of ``LOOKUP_NODES`` from each level alone."""
        found: dict[Source, float] = {}
        request: HierarchyRequest | None = seq.drafter_state.get(self.name)
        if request is None:
            return found
        self._refresh(request, seq, self._sources.version)
        for level, source in enumerate(LEVEL_SOURCES):
            if request.levels & (1 << level):
                started = time.perf_counter()
                self._grow(request, 1 << level, LOOKUP_NODES, LOOKUP_DEPTH, self.options.min_score)
                found[source] = found.get(source, 0.0) + time.perf_counter() - started
        return found

    def held(self) -> MemoryUsage:
        """The contexts of running sequences; the bytes include pooled tables for later ones, and
        the calibrations of requests that leave nothing behind."""
        copies = sum(calibration.num_bytes for calibration in self._copies)
        contexts = sum(context.num_bytes for context in self._contexts)
        num_entries = sum(context.num_entries for context in self._contexts)
        return MemoryUsage(num_entries, contexts + copies + self._pool.num_bytes)

    def learned(self) -> MemoryUsage:
        """The calibrations of all namespaces, packed ones too."""
        return MemoryUsage(self._calibrations.num_kept, self._calibrations.num_bytes)

    def observe_all(self, verified: Collection[Verified]) -> None:
        known = self._known(verified)
        try:
            self._sources.catch_up()
            self._reserve_recycled(known)
        finally:  # decided tokens are appended to each text even if memory is short
            self._learn(known)
        database = self._resources.model_database
        if database is not None and len(self._contexts) > 1:
            database.record_running([one.seq for request, one, _ in known if request.is_shared])

    def _known(self, verified: Iterable[Verified]) -> list[_Decided]:
        """Those sequences that were started, with what is kept for them."""
        known: list[_Decided] = []
        for one in verified:
            request: HierarchyRequest | None = one.seq.drafter_state.get(self.name)
            if request is not None:
                tree = one.tree
                is_recycled = (
                    self.options.recycled
                    and request.is_shared
                    and one.forward is not None
                    and tree.capacity > 0
                )
                known.append((request, one, len(tree) if is_recycled else 0))
        return known

    def _reserve_recycled(self, known: Iterable[_Decided]) -> None:
        """Make room for the likeliest tokens that are to be kept, within the limit."""
        num_nodes: dict[str, int] = {}
        for _, one, num_kept in known:
            if num_kept:
                namespace = one.seq.namespace
                num_nodes[namespace] = num_nodes.get(namespace, 0) + num_kept
        database = self._resources.model_database
        for namespace, number in num_nodes.items():
            assert database is not None, "something is shared"
            database.recycling(namespace, number * len(RECYCLED_ORDERS))

    def _learn(self, known: Collection[_Decided]) -> None:
        """Append to the texts of requests and learn from what is new; also keep the likeliest
        tokens after nodes of their trees."""
        for request, one, _ in known:
            self._make_room(request, one)
        version = self._sources.version
        step = DecidedStep(self._num_top)
        for request, one, num_kept in known:
            self._refresh(request, one.seq, version)
            step.add(request, one, self._count(request, one), num_kept)
        all_added = step.learn(
            self._scratch_handles.address, self.options.learning_rate, _BIAS_RATE
        )
        for request, one, _ in known:
            request.context.num_tokens += len(one.acceptance.token_ids)
        for (request, one, _), num_added in zip(known, all_added, strict=True):
            if num_added > request.max_added and request.context.is_table_full:
                self._enlarge(request, one.seq, len(one.acceptance.token_ids))

    def _make_room(self, request: HierarchyRequest, one: Verified) -> None:
        """Give a request room for the decided tokens."""
        num_new = len(one.acceptance.token_ids)
        if not request.context.is_complete:
            request.context.continue_prompt()
        if not request.context.has_room(num_new):
            self._enlarge(request, one.seq, num_new)

    def _count(self, request: HierarchyRequest, one: Verified) -> int:
        """Count the result of a tree; returns from how many of its last tokens to learn."""
        num_learned = len(one.acceptance.token_ids)
        if num_learned > NUM_LEARNED_LATER and _is_told_later(one.tree):
            num_learned = NUM_LEARNED_LATER
        if self.options.learning_rate:
            request.count_tree(one.tree, one.acceptance)
            request.calibration.count_tokens(num_learned)
        return num_learned

    def _enlarge(self, request: HierarchyRequest, seq: Sequence, num_new: int) -> None:
        """Give a request room for ``num_new`` more tokens and their contexts."""
        request.context.enlarge(num_new)
        request.state[STATE_CONTEXT_STAMP] = request.context.table.stamp
        self._connect(request, seq)

    def finish(self, seq: Sequence) -> None:
        request: HierarchyRequest | None = seq.drafter_state.pop(self.name, None)
        if request is not None:
            request.calibration.num_requests -= 1
            request.context.release()
            self._contexts.discard(request.context)
            self._copies.discard(request.calibration)


def _is_told_later(tree: DraftTree) -> bool:
    """Whether a tree reports steps without drafts; see :meth:`Drafter.observe`."""
    return tree.num_draft_tokens > 0 and tree.sources[1] is Source.PLAIN
