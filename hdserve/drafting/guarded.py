"""Drafting that fails open: whatever a drafter does, decoding goes on."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from hdserve import core
from hdserve.drafting.base import BatchDrafter, Drafter, MemoryUsage, Verified
from hdserve.drafting.merging import UNCORRECTED, merge_trees
from hdserve.drafting.states import as_state, fit_states, pack_states, unpack_states
from hdserve.tree import DraftTree

if TYPE_CHECKING:
    from hdserve.databases.statistics import StatisticsDatabase

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALLS = (
    *("warm_up", "use_statistics", "start", "propose", "observe", "finish"),
    *("lookup_times_s", "held", "learned", "state", "adopt", "forget"),
)
"""The methods of drafters that are guarded."""

_RUST_PANIC = "PanicException"
"""What a Rust extension raises, which is not an ``Exception``."""

_AROUND = (
    *(("all", "state"), ("all", "adopt"), ("engine", "on_finish")),
    ("grammar", "propose"),
)
"""Further guarded calls: packing and unpacking what all drafters have learned, calling the engine's
listener, and asking the grammar of an answer what it allows."""


_NewNodes = tuple[list[int], list[int], list[core.Source], list[float], list[int]]
"""Tokens, parents, sources, scores and depths of nodes, as
:meth:`~hdserve.tree.DraftTree.add_behind` takes them."""


class GuardedDrafters:
    """Fills one tree from several drafters; the one place where their errors end.

    An exception, an id outside the vocabulary, a misplaced node, a score that is not a probability,
    or a source that the request does not allow costs that drafter's guess of this step: it is
    counted, and logged the first time for each drafter and call.
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int) -> None:
        self._drafters = tuple(drafters)
        self._vocab_size = vocab_size
        self.needs_hidden = any(drafter.needs_hidden for drafter in self._drafters)
        self.num_failures: Counter[tuple[str, str]] = Counter()
        """How many calls have failed, by drafter and call."""
        self.times_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        """How long calls took in total, by drafter and call; every existing pair is there from the
        start, with 0."""
        self.times_s |= dict.fromkeys(_AROUND, 0.0)
        for drafter in self._drafters:
            self.times_s |= {(drafter.name, call): 0.0 for call in CALLS}
        self._open: set[str] = set()

    @property
    def num_sequences(self) -> int:
        """Sequences that were started and have not been finished."""
        return len(self._open)

    def has_started(self, seq: core.Sequence) -> bool:
        """Whether ``seq`` was started and not finished."""
        return seq.request_id in self._open

    def start(self, seq: core.Sequence) -> None:
        self._open.add(seq.request_id)
        for drafter in self._drafters:
            self.run(drafter.name, "start", drafter.start, seq)

    def propose(
        self, seq: core.Sequence, tree: DraftTree, corrections: Sequence[float] = UNCORRECTED
    ) -> None:
        """Fill ``tree``; whatever happens it stays a valid tree of valid ids, and keeps the nodes
        it has.

        A drafter fills a separate tree, whose nodes are taken once they are checked; from several
        trees the likeliest nodes are taken (``merge_trees``).

        Args:
            corrections: the observed worth of scores, by source.
        """
        if len(self._drafters) == 1:
            self._ask(self._drafters[0], seq, tree)
            return
        trees = [tree.copy() for _ in self._drafters]
        for drafter, own in zip(self._drafters, trees, strict=True):
            self._ask(drafter, seq, own)
        merge_trees(trees, tree, corrections)

    def _ask(self, drafter: Drafter, seq: core.Sequence, tree: DraftTree) -> None:
        """Fill ``tree``, which stays unchanged if ``drafter`` fails."""
        self.run(drafter.name, "propose", self._propose, drafter, seq, tree)

    def _propose(self, drafter: Drafter, seq: core.Sequence, tree: DraftTree) -> None:
        own = tree.copy()
        drafter.propose(seq, own)
        if not own.begins_with(tree):
            raise ValueError("the nodes that the tree had are others now")
        new = _new_nodes(own, len(tree))
        _check_nodes(new, tree, self._vocab_size)
        _check_sources(new[2], seq.speculation)
        tree.add_behind(*new)

    def observe(self, verified: Collection[Verified]) -> None:
        """Report the results of a step's trees."""
        for drafter in self._drafters:
            if isinstance(drafter, BatchDrafter):
                self.run(drafter.name, "observe", drafter.observe_all, verified)
                continue
            for one in verified:
                self.run(drafter.name, "observe", drafter.observe, *one)

    def finish(self, seq: core.Sequence) -> None:
        self._open.discard(seq.request_id)
        for drafter in self._drafters:
            self.run(drafter.name, "finish", drafter.finish, seq)

    def warm_up(self) -> None:
        """Do what takes long before the first request."""
        for drafter in self._drafters:
            self.run(drafter.name, "warm_up", drafter.warm_up)

    def use_statistics(self, statistics: StatisticsDatabase | None) -> None:
        """Draft from another statistics database, or none, from now on."""
        for drafter in self._drafters:
            self.run(drafter.name, "use_statistics", drafter.use_statistics, statistics)

    def lookup_times_s(self, seq: core.Sequence) -> dict[core.Source, float]:
        """How long each source alone would take to draft now, over all drafters."""
        found: Counter[core.Source] = Counter()
        for drafter in self._drafters:
            times_s = self.run(drafter.name, "lookup_times_s", _lookup_times_s, drafter, seq)
            found.update(times_s or {})
        return dict(found)

    def held(self) -> MemoryUsage:
        """What all drafters hold for running sequences."""
        return _total(
            self.run(drafter.name, "held", _usage, drafter.held) for drafter in self._drafters
        )

    def learned(self) -> MemoryUsage:
        """What all drafters keep of what they learned."""
        return _total(
            self.run(drafter.name, "learned", _usage, drafter.learned) for drafter in self._drafters
        )

    def states(self, namespace: str) -> bytes | None:
        """What the drafters have learned of a namespace, if there is anything new."""
        found: dict[str, bytes] = {}
        for drafter in self._drafters:
            state = self.run(drafter.name, "state", _state, drafter, namespace)
            if state is not None:
                found[drafter.name] = state
        fitting = self.run("all", "state", fit_states, found, self._shrunk)
        return pack_states(fitting) if fitting else None

    def _shrunk(self, name: str, state: bytes, max_bytes: int) -> bytes:
        drafter = next(drafter for drafter in self._drafters if drafter.name == name)
        return self.run(name, "state", _shrunk_state, drafter, state, max_bytes) or state

    def adopt(self, namespace: str, states: bytes) -> None:
        """Take over what all replicas together have learned."""
        found = self.run("all", "adopt", unpack_states, states) or {}
        for drafter in self._drafters:
            if drafter.name in found:
                self.run(drafter.name, "adopt", drafter.adopt, namespace, found[drafter.name])

    def forget(self, namespace: str) -> None:
        """Start anew with a namespace."""
        for drafter in self._drafters:
            self.run(drafter.name, "forget", drafter.forget, namespace)

    def run(self, name: str, call: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """The result of ``function``; ``None`` if it fails, which counts as a failure of ``call``
        of ``name``."""
        started = time.perf_counter()
        try:
            return function(*arguments)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != _RUST_PANIC:
                raise
            self.num_failures[name, call] += 1
            if self.num_failures[name, call] == 1:
                logger.exception("drafter %s failed in %s; decoding goes on", name, call)
            return None
        finally:
            self.times_s[name, call] += time.perf_counter() - started


def _lookup_times_s(drafter: Drafter, seq: core.Sequence) -> dict[core.Source, float]:
    times_s = drafter.lookup_times_s(seq)
    return {core.Source(source): float(value) for source, value in times_s.items()}


def _usage(ask: Callable[[], MemoryUsage]) -> MemoryUsage:
    found = ask()
    return MemoryUsage(int(found.num_entries), int(found.num_bytes))


def _total(usages: Iterable[MemoryUsage | None]) -> MemoryUsage:
    """The sum of those that are known."""
    known = [usage for usage in usages if usage is not None]
    return MemoryUsage(
        sum(usage.num_entries for usage in known), sum(usage.num_bytes for usage in known)
    )


def _state(drafter: Drafter, namespace: str) -> bytes | None:
    found = drafter.state(namespace)
    return None if found is None else as_state(found)


def _shrunk_state(drafter: Drafter, state: bytes, max_bytes: int) -> bytes:
    return as_state(drafter.shrink_state(state, max_bytes))


def _new_nodes(tree: DraftTree, begin: int) -> _NewNodes:
    """The nodes from ``begin`` on.  Their numbers, which may be those of numpy or PyTorch, become
    Python's; compiled code takes no others.

    Raises:
        TypeError: some are no numbers, or tokens, parents or depths that are no integers.
    """
    return (
        [*map(index, tree.token_ids[begin:])],
        [*map(index, tree.parents[begin:])],
        [*tree.sources[begin:]],
        [*map(float, tree.scores[begin:])],
        [*map(index, tree.depths[begin:])],
    )


def _check_nodes(new: _NewNodes, tree: DraftTree, vocab_size: int) -> None:
    """Whether ``new`` may be added to ``tree``.

    Raises:
        ValueError: a node violates the rules of :class:`DraftTree`, or lacks something.
    """
    depths = [*tree.depths]
    nodes = enumerate(zip(*new, strict=True), len(depths))
    for node, (token_id, parent, _, score, depth) in nodes:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"node {node} has token id {token_id}, not one of the vocabulary")
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"node {node} has score {score}, which is no probability")
        if not 0 <= parent < node or depth != depths[parent] + 1 or depth > tree.max_depth:
            raise ValueError(f"node {node} has parent {parent} and depth {depth}")
        depths.append(depth)
    if len(depths) > tree.capacity + 1:
        raise ValueError(f"{len(depths) - 1} tokens are more than {tree.capacity}")


def _check_sources(sources: Sequence[core.Source], speculation: core.SpeculationParams) -> None:
    """
    Raises:
        ValueError: a node has no source, or one that the request does not allow.

    """
    for source in {*sources}:
        if not isinstance(source, core.Source):
            raise ValueError(f"{source!r} is not a source")
        if not speculation.allows(source):
            raise ValueError(f"the request does not allow the source {source.label}")
