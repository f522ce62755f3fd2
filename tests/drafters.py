"""Drafters for the tests: one that is always right, one that never is, one that breaks."""

from __future__ import annotations

import time

from hdserve import core
from hdserve.core import Source
from hdserve.drafting.base import Drafter, Forward
from hdserve.drafting.hierarchy import Hierarchy, HierarchyOptions
from hdserve.tree import Acceptance, DraftTree

DATABASES = ("context", "model", "statistics", "recycled")


def only(database: str) -> HierarchyOptions:
    """Draft from this database alone."""
    return HierarchyOptions.model_validate({name: name == database for name in DATABASES})


class SecondHierarchy(Hierarchy):
    """One more that learns and shares a calibration."""

    name = "mine"


class OracleDrafter(Drafter):
    """Knows the whole output of each request and drafts it behind decoys.

    Args:
        futures: the full token ids, prompt included, by request id.
        length: tokens of a draft.
    """

    name = "oracle"

    def __init__(self, futures: dict[str, list[int]], length: int = 5) -> None:
        self._futures = futures
        self._length = length

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        start = len(seq.token_ids)
        future = self._futures[seq.request_id][start : start + self._length]
        tree.add_path([_other(token_id) for token_id in future[:3]], Source.OTHER, 0.5)
        tree.add_path([*future[:2], _other(future[-1])] if future else [], Source.OTHER, 0.5)
        tree.add_path(future, Source.OTHER, 0.9)


class SlowLearner(OracleDrafter):
    """Is always right, and thinks about it longer than its drafts save."""

    name = "slow"

    def observe(
        self, seq: core.Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        if tree.num_draft_tokens:
            time.sleep(0.25)


class InterruptedDrafter(OracleDrafter):
    """Is always right; it is interrupted in calls, as by Ctrl-C.

    Args:
        call: ``start``, ``propose``, ``observe`` or ``finish``.
        num_before: calls of this kind that go well before.
        num_times: calls that are interrupted, one after the other.
    """

    name = "interrupted"

    def __init__(
        self, futures: dict[str, list[int]], call: str, num_before: int = 0, num_times: int = 1
    ) -> None:
        super().__init__(futures)
        self._call = call
        self._num_before = num_before
        self._num_times = num_times

    def start(self, seq: core.Sequence) -> None:
        self._count("start")

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        self._count("propose")
        super().propose(seq, tree)

    def observe(
        self, seq: core.Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        self._count("observe")

    def finish(self, seq: core.Sequence) -> None:
        self._count("finish")

    def _count(self, call: str) -> None:
        if call == self._call:
            self._num_before -= 1
            if -self._num_times <= self._num_before < 0:
                raise KeyboardInterrupt


def _other(token_id: int) -> int:
    """Another token of the vocabulary."""
    return token_id - 1 if token_id else 1


class JunkDrafter(Drafter):
    """Drafts a full tree of pseudo-random tokens."""

    name = "junk"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        state = len(seq.token_ids) * 7919 + seq.token_ids[-1]
        while not tree.is_full:
            state = (state * 1103515245 + 12345) % 2**31
            parent = state // 64 % len(tree)
            if tree.add_node(parent, state % self._vocab_size, Source.OTHER, 0.1) is None:
                return


class RaisingDrafter(Drafter):
    """Raises in every method, after it has half filled the tree."""

    name = "raising"

    def __init__(self) -> None:
        """Nothing is needed to fail."""

    def warm_up(self) -> None:
        raise RuntimeError("warm_up")

    def state(self, namespace: str) -> bytes | None:
        raise RuntimeError("state")

    def adopt(self, namespace: str, state: bytes) -> None:
        raise RuntimeError("adopt")

    def forget(self, namespace: str) -> None:
        raise RuntimeError("forget")

    def start(self, seq: core.Sequence) -> None:
        raise RuntimeError("start")

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        tree.add_path([1, 2, 3], Source.OTHER)
        raise RuntimeError("propose")

    def observe(
        self,
        seq: core.Sequence,
        tree: DraftTree,
        acceptance: Acceptance,
        forward: Forward | None,
    ) -> None:
        raise RuntimeError("observe")

    def finish(self, seq: core.Sequence) -> None:
        raise RuntimeError("finish")


class ForeignTokenDrafter(Drafter):
    """Proposes ids that are not in the vocabulary."""

    name = "foreign"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        tree.add_path([0, self._vocab_size], Source.OTHER)


class UnmergedDrafter(JunkDrafter):
    """Learns, and fails to make one of two states."""

    name = "mine"

    @classmethod
    def merge_states(cls, kept: bytes, new: bytes) -> bytes:
        raise KeyError(kept)


class UnshrunkDrafter(JunkDrafter):
    """Learns much, and fails to say it in fewer bytes."""

    name = "mine"

    @classmethod
    def shrink_state(cls, state: bytes, max_bytes: int) -> bytes:
        raise KeyError(max_bytes)


class MislaidDrafter(JunkDrafter):
    """Learns, and forgets to return what it makes of it."""

    name = "mine"

    @classmethod
    def merge_states(cls, kept: bytes, new: bytes) -> bytes:
        return None  # type: ignore[return-value]

    @classmethod
    def shrink_state(cls, state: bytes, max_bytes: int) -> bytes:
        return "less"  # type: ignore[return-value]


class UnmadeDrafter(Drafter):
    """Is made of nothing, where the registry passes two arguments."""

    name = "mine"

    def __init__(self) -> None:
        pass

    def propose(self, seq: core.Sequence, tree: DraftTree) -> None:
        pass
