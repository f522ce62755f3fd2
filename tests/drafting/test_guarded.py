"""Whatever a drafter does, the tree is valid and decoding goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch

from hdserve.core import SamplingParams, Sequence, Source, SpeculationParams
from hdserve.drafting.base import BatchDrafter, Drafter, Forward, Verified
from hdserve.drafting.guarded import GuardedDrafters
from hdserve.drafting.states import pack_states, unpack_states
from hdserve.tree import Acceptance, DraftTree
from tests.drafters import ForeignTokenDrafter, JunkDrafter, RaisingDrafter

VOCAB_SIZE = 50


class PathDrafter(Drafter):
    """Drafts one path, and counts its calls."""

    name = "path"

    def __init__(self, *path: int, needs_hidden: bool = False) -> None:
        self._path = path
        self.needs_hidden = needs_hidden  # type: ignore[misc]
        self.calls: list[str] = []

    def start(self, seq: Sequence) -> None:
        self.calls.append("start")

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        self.calls.append("propose")
        tree.add_path(self._path, Source.CONTEXT)

    def observe(
        self, seq: Sequence, tree: DraftTree, acceptance: Acceptance, forward: Forward | None
    ) -> None:
        self.calls.append("observe")

    def finish(self, seq: Sequence) -> None:
        self.calls.append("finish")

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def state(self, namespace: str) -> bytes | None:
        return namespace.encode() if namespace else None

    def adopt(self, namespace: str, state: bytes) -> None:
        self.calls.append(f"adopt {state.decode()}")

    def forget(self, namespace: str) -> None:
        self.calls.append(f"forget {namespace}")


class OddDrafter(Drafter):
    """Does one odd thing to the tree, after a good guess."""

    name = "odd"

    def __init__(self, oddity: Callable[[DraftTree], Any]) -> None:
        self._oddity = oddity

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        tree.add_path([1, 2], Source.OTHER)
        self._oddity(tree)


COLUMNS = ("token_ids", "parents", "depths", "sources", "scores")


class PanicException(BaseException):
    """That of an extension in Rust."""


def _panic() -> None:
    raise PanicException


ODDITIES: dict[str, Callable[[DraftTree], Any]] = {
    "id too large": lambda tree: tree.add_node(0, VOCAB_SIZE, Source.OTHER),
    "negative id": lambda tree: tree.add_node(0, -1, Source.OTHER),
    "id that is none": lambda tree: tree.add_node(0, None, Source.OTHER),  # type: ignore[arg-type]
    "id that is no number": lambda tree: tree.add_node(0, float("nan"), Source.OTHER),  # type: ignore[arg-type]
    "no such parent": lambda tree: tree.add_node(17, 3, Source.OTHER),
    "negative parent": lambda tree: tree.add_node(-1, 3, Source.OTHER),
    "score above one": lambda tree: tree.add_node(0, 3, Source.OTHER, 1.5),
    "negative score": lambda tree: tree.add_node(0, 3, Source.OTHER, -0.1),
    "score that is no number": lambda tree: tree.add_node(0, 3, Source.OTHER, float("nan")),
    "all depths": lambda tree: setattr(tree, "depths", [depth + 1 for depth in tree.depths]),
    "exception": lambda tree: 1 // 0,
    "too many nodes": lambda tree: tree.token_ids.extend([5] * 20),
    "scores that are no list": lambda tree: setattr(tree, "scores", np.array(tree.scores) * 2),
    "tokens that are no list": lambda tree: setattr(tree, "token_ids", np.array([4, 10**9])),
    "no tokens": lambda tree: setattr(tree, "token_ids", []),
    "nothing at all": lambda tree: [getattr(tree, name).clear() for name in COLUMNS],
    "panic": lambda tree: _panic(),
    "name of a source": lambda tree: tree.add_node(0, 3, "other"),  # type: ignore[arg-type]
}

BULK_ODDITIES: dict[str, dict[str, Any]] = {
    "parents before the root": {"parents": [-1, 1]},
    "parents behind their children": {"parents": [2, 1]},
    "wrong depths": {"depths": [1, 1]},
    "too few depths": {"depths": [1]},
    "too few parents": {"parents": [0]},
    "too few sources": {"sources": [Source.OTHER]},
    "too few scores": {"scores": [0.5]},
}


class BulkDrafter(Drafter):
    """Adds two nodes at once, but for what ``columns`` say a path."""

    name = "odd"

    def __init__(self, **columns: Any) -> None:
        self._columns = {
            "parents": [0, 1],
            "sources": [Source.OTHER] * 2,
            "scores": [0.5] * 2,
            "depths": [1, 2],
            **columns,
        }

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        tree.add_behind([3, 4], **self._columns)


def make_sequence() -> Sequence:
    return Sequence("a", [3, 4], SamplingParams())


def observe(drafters: GuardedDrafters) -> None:
    tree = DraftTree(4, 0)
    drafters.observe([Verified(make_sequence(), tree, Acceptance([0], [5]), None)])


@pytest.mark.parametrize("name", ODDITIES)
def test_odd_guesses_are_dropped(name: str) -> None:
    """A guess that is no guess costs that drafter's part of the tree, no more: those before and
    after it keep theirs, and the failure is counted."""
    drafters = GuardedDrafters(
        [PathDrafter(7, 8), OddDrafter(ODDITIES[name]), PathDrafter(9)], VOCAB_SIZE
    )
    for step in range(1, 4):
        tree = DraftTree(4, 10)
        drafters.propose(make_sequence(), tree)
        assert tree.token_ids == [4, 7, 8, 9]
        assert tree.parents == [-1, 0, 1, 0]
        assert drafters.num_failures == {("odd", "propose"): step}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", [tuple, np.array])
def test_a_tree_is_made_of_lists(column: str, kind: Callable[[list[Any]], Any]) -> None:
    """Whatever a drafter makes of them: those who cut the tree change lists."""

    def change(tree: DraftTree) -> None:
        setattr(tree, column, kind(getattr(tree, column)))

    drafters = GuardedDrafters([OddDrafter(change)], VOCAB_SIZE)
    tree = DraftTree(4, 10)
    drafters.propose(make_sequence(), tree)
    assert all(type(getattr(tree, name)) is list for name in COLUMNS)
    has_failed = (column, kind) == ("sources", np.array)  # whose entries are numbers then
    assert tree.token_ids == ([4] if has_failed else [4, 1, 2])
    assert drafters.num_failures == ({("odd", "propose"): 1} if has_failed else {})


def test_numbers_of_other_libraries_become_pythons() -> None:
    """As the budget and the forward read them in compiled code."""
    odd = BulkDrafter(
        parents=[*torch.tensor([0, 1])],
        scores=[torch.tensor(0.5), np.float32(0.5)],
        depths=[*np.array([1, 2])],
    )
    drafters = GuardedDrafters([odd], VOCAB_SIZE)
    tree = DraftTree(4, 10)
    drafters.propose(make_sequence(), tree)
    assert tree.scores == [1.0, 0.5, 0.5]
    assert {type(score) for score in tree.scores} == {float}
    whole = [*tree.token_ids, *tree.parents, *tree.depths]
    assert whole == [4, 3, 4, -1, 0, 1, 0, 1, 2]
    assert {type(number) for number in whole} == {int}
    assert drafters.num_failures == {}


@pytest.mark.parametrize("limit", ["capacity", "max_depth"])
def test_a_tree_stays_as_large_as_it_may_be(limit: str) -> None:
    """A sequence has rows of the cache for no more nodes, and behind them are those of others."""

    def enlarge(tree: DraftTree) -> None:
        setattr(tree, limit, 20)
        tree.add_path([5] * 4, Source.OTHER)
        tree.add_path([6] * 4, Source.OTHER)

    drafters = GuardedDrafters([OddDrafter(enlarge)], VOCAB_SIZE)
    tree = DraftTree(4, 8 if limit == "max_depth" else 6, 4 if limit == "capacity" else 3)
    limits = tree.capacity, tree.max_depth
    drafters.propose(make_sequence(), tree)
    assert tree.token_ids == [4]
    assert (tree.capacity, tree.max_depth) == limits
    assert drafters.num_failures == {("odd", "propose"): 1}


@pytest.mark.parametrize("name", BULK_ODDITIES)
def test_odd_trees_are_dropped(name: str) -> None:
    """Nodes that are added at once are looked at one by one: a model that is told wrong parents or
    depths would say wrong tokens, and a column that is short would end all requests."""
    odd = BulkDrafter(**BULK_ODDITIES[name])
    drafters = GuardedDrafters([odd, PathDrafter(9)], VOCAB_SIZE)
    tree = DraftTree(4, 10)
    drafters.propose(make_sequence(), tree)
    assert [tree.token_ids, tree.parents, tree.depths] == [[4, 9], [-1, 0], [0, 1]]
    assert [tree.sources, tree.scores] == [[Source.PLAIN, Source.CONTEXT], [1.0, 1.0]]
    assert drafters.num_failures == {("odd", "propose"): 1}


def test_only_what_the_request_allows_drafts() -> None:
    """Whether or not a drafter asks."""
    drafters = GuardedDrafters([JunkDrafter(VOCAB_SIZE), PathDrafter(9)], VOCAB_SIZE)
    speculation = SpeculationParams(databases=frozenset({"context"}))
    tree = DraftTree(4, 10)
    drafters.propose(Sequence("a", [3, 4], SamplingParams(), speculation), tree)
    assert tree.sources == [Source.PLAIN, Source.CONTEXT]
    assert drafters.num_failures == {("junk", "propose"): 1}


class TogetherDrafter(BatchDrafter):
    """Learns of two sequences at once, and fails with more."""

    name = "together"

    def __init__(self) -> None:
        self.told: list[str] = []

    def propose(self, seq: Sequence, tree: DraftTree) -> None:
        tree.add_path([9], Source.OTHER)

    def observe_all(self, verified: Collection[Verified]) -> None:
        if len(verified) > 2:
            raise RuntimeError("observe")
        self.told.append("+".join(one.seq.request_id for one in verified))


def test_drafters_may_learn_of_all_sequences_at_once() -> None:
    """Whoever does is told of all of a step, others of one after the other; where the first fails,
    which counts once, the others are still told."""
    together, alone = TogetherDrafter(), PathDrafter(7)
    drafters = GuardedDrafters([together, alone], VOCAB_SIZE)
    acceptance = Acceptance([0], [5])
    verified = [
        Verified(Sequence(name, [3, 4], SamplingParams()), DraftTree(4, 0), acceptance, None)
        for name in "abc"
    ]
    drafters.observe(verified[:2])
    together.observe(*verified[2])
    assert together.told == ["a+b", "c"]
    assert alone.calls == ["observe"] * 2
    drafters.observe(verified)
    assert alone.calls == ["observe"] * 5
    assert drafters.num_failures == {("together", "observe"): 1}


def test_every_method_may_raise() -> None:
    """A drafter that raises everywhere is counted everywhere, and the others are still called."""
    good = PathDrafter(7)
    drafters = GuardedDrafters([RaisingDrafter(), good], VOCAB_SIZE)
    seq, tree = make_sequence(), DraftTree(4, 10)
    drafters.warm_up()
    drafters.start(seq)
    drafters.propose(seq, tree)
    observe(drafters)
    drafters.finish(seq)
    assert good.calls == ["warm_up", "start", "propose", "observe", "finish"]
    assert tree.token_ids == [4, 7]
    assert drafters.num_failures == {
        ("raising", call): 1 for call in ("warm_up", "start", "propose", "observe", "finish")
    }


class ForgetfulDrafter(PathDrafter):
    """Shares what it learned, and cannot take it back."""

    name = "forgetful"

    def adopt(self, namespace: str, state: bytes) -> None:
        raise RuntimeError("adopt")


def test_what_a_drafter_says_of_itself_may_be_anything() -> None:
    """It is counted, and the others are heard."""

    class Odd(PathDrafter):
        name = "odd"

        def held(self) -> Any:
            return 3, 4

        def learned(self) -> Any:
            return None

        def lookup_times_s(self, seq: Sequence) -> Any:
            return [1.0]

        def state(self, namespace: str) -> Any:
            return "a text"

    drafters = GuardedDrafters([Odd(1), PathDrafter(2)], VOCAB_SIZE)
    assert drafters.held() == PathDrafter(2).held()
    assert drafters.learned() == PathDrafter(2).learned()
    assert drafters.lookup_times_s(make_sequence()) == {}
    assert unpack_states(drafters.states("default") or b"") == {"path": b"default"}
    calls = ("held", "learned", "lookup_times_s", "state")
    assert drafters.num_failures == {("odd", call): 1 for call in calls}


def test_states_are_shared_between_drafters_of_one_name() -> None:
    """What drafters have learned is packed and given back to each by name; one that fails, news of
    a drafter that is not there, and corrupt bytes cost the others nothing."""
    good = PathDrafter(7)
    drafters = GuardedDrafters([RaisingDrafter(), ForgetfulDrafter(), good], VOCAB_SIZE)
    assert drafters.states("") is None, "nothing new"
    states = drafters.states("tenant")
    assert states is not None
    drafters.adopt("tenant", states)
    assert good.calls == ["adopt tenant"]
    drafters.adopt("tenant", b"corrupt")
    GuardedDrafters([RaisingDrafter()], VOCAB_SIZE).adopt("tenant", states)
    assert good.calls == ["adopt tenant"]
    assert drafters.num_failures == {
        ("raising", "state"): 2,
        ("forgetful", "adopt"): 1,
        ("all", "adopt"): 1,
    }


def test_all_drafters_forget() -> None:
    """Whether or not one before them can."""
    good = PathDrafter(7)
    drafters = GuardedDrafters([RaisingDrafter(), good], VOCAB_SIZE)
    drafters.forget("tenant")
    assert good.calls == ["forget tenant"]
    assert drafters.num_failures == {("raising", "forget"): 1}


def test_failures_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that fails in every step fills the counters, not the log."""
    drafters = GuardedDrafters([ForeignTokenDrafter(VOCAB_SIZE)], VOCAB_SIZE)
    logger = logging.getLogger("hdserve")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for _ in range(5):
            drafters.propose(make_sequence(), DraftTree(4, 10))
    finally:
        logger.setLevel(level)
    (record,) = caplog.records
    assert "foreign failed in propose" in record.getMessage()
    assert record.exc_info is not None
    assert drafters.num_failures["foreign", "propose"] == 5


def test_the_likeliest_guesses_of_all_drafters_are_kept() -> None:
    """Whichever drafter comes first, a good guess of another is not displaced by many bad ones."""
    junk, good = JunkDrafter(VOCAB_SIZE), PathDrafter(7, 8, 9)
    for both in ([junk, good], [good, junk]):
        drafters = GuardedDrafters(both, VOCAB_SIZE)
        tree = DraftTree(4, 5)
        drafters.propose(make_sequence(), tree)
        assert tree.is_full
        assert tree.token_ids[:4] == [4, 7, 8, 9]
        assert tree.scores[1:] == [1.0] * 3 + [0.1] * 2


def test_a_drafter_alone_fills_the_tree_as_it_likes() -> None:
    tree = DraftTree(4, 3)
    GuardedDrafters([OddDrafter(lambda tree: tree.add_path([3], Source.MODEL))], 50).propose(
        make_sequence(), tree
    )
    assert tree.token_ids == [4, 1, 2, 3]


def test_room_that_a_failure_leaves_is_used() -> None:
    """A drafter that fails after filling the tree leaves it to the next one."""
    drafters = GuardedDrafters([RaisingDrafter(), PathDrafter(7, 8)], VOCAB_SIZE)
    tree = DraftTree(4, 3)
    drafters.propose(make_sequence(), tree)
    assert tree.token_ids == [4, 7, 8]


def test_hidden_states_are_asked_for_by_anyone() -> None:
    """One drafter that needs hidden states is enough; none needs none."""
    assert not GuardedDrafters([], VOCAB_SIZE).needs_hidden
    assert not GuardedDrafters([PathDrafter(1)], VOCAB_SIZE).needs_hidden
    both = [PathDrafter(1), PathDrafter(2, needs_hidden=True)]
    assert GuardedDrafters(both, VOCAB_SIZE).needs_hidden


def test_no_drafters_is_plain_decoding() -> None:
    """Without drafters every call does nothing."""
    drafters = GuardedDrafters([], VOCAB_SIZE)
    tree = DraftTree(4, 10)
    drafters.start(make_sequence())
    drafters.propose(make_sequence(), tree)
    observe(drafters)
    drafters.finish(make_sequence())
    assert len(tree) == 1
    assert not drafters.num_failures


def test_each_call_is_counted_from_the_start() -> None:
    """Times and failures of a call are series that begin with 0, not with its first call."""
    drafters = GuardedDrafters([PathDrafter(1)], VOCAB_SIZE)
    counted = set(drafters.times_s) - {("engine", "on_finish"), ("grammar", "propose")}
    seq, tree = Sequence("a", [1, 2], SamplingParams()), DraftTree(2, 4)
    drafters.times_s.clear()
    drafters.warm_up()
    drafters.use_statistics(None)
    drafters.start(seq)
    drafters.propose(seq, tree)
    drafters.observe([Verified(seq, tree, Acceptance((0,), (3,)), None)])
    drafters.lookup_times_s(seq)
    drafters.held()
    drafters.learned()
    drafters.states("a")
    drafters.adopt("a", pack_states({"path": b"learned"}))
    drafters.forget("a")
    drafters.finish(seq)
    assert set(drafters.times_s) == counted
